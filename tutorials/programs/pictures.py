"""The pictures of the lessons, from what was measured here and what was recorded on an H200."""

from __future__ import annotations

import functools
import io
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import recorded
from language import say, spoken
from matplotlib import font_manager
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from practice import Program, describe

from dpscope.reports.drawing import new_figure, styled
from dpscope.reports.looks import METHOD_COLOURS, METHOD_MARKERS
from dpscope.vocabulary.instruments import Schedule

HERE, H200, FAINT = "#88CCEE", "#332288", "#BBBBBB"
CHINESE_FONTS = ("Noto Sans CJK SC", "Source Han Sans SC", "Microsoft YaHei", "PingFang SC", "WenQuanYi Micro Hei")
Draw = TypeVar("Draw", bound=Callable[..., Any])


@functools.cache
def chinese_font() -> str | None:
    """Return an installed font that has Chinese characters."""
    installed = {font.name for font in font_manager.fontManager.ttflist}
    return next((name for name in CHINESE_FONTS if name in installed), None)


def label(en: str, zh: str) -> str:
    """Return a label in the language of the lesson, or in English if no installed font can write it."""
    return say(en, zh) if chinese_font() else en


def drawn(draw: Draw) -> Draw:
    """Draw in dpscope's style, with a font for the language of the lesson."""

    @functools.wraps(draw)
    def with_font(*arguments: Any, **options: Any) -> Any:
        import matplotlib

        font = chinese_font() if spoken() == "zh" else None
        if font:
            matplotlib.rcParams["font.family"] = [font, "DejaVu Sans"]  # kept by each text, also after this
        return draw(*arguments, **options)

    return cast(Draw, styled(with_font))


def tell(program: Program, live: Sequence[dict[str, Any]]) -> None:
    """Print what was measured here, and what was recorded on the H200, for every way of a case."""
    print(say(f"Task: {program.task}", f"任务：{program.task}"))
    print(say("measured here:", "在本机测得："))
    for measured in live:
        print(" ", describe(measured))
    print(say("recorded on an H200:", "在 H200 上录得："))
    for way in program.ways:
        kept = recorded.program(program.name, way)
        print(" ", describe(kept) if kept else f"{program.name} {way}: {recorded.NOT_RECORDED}")


@drawn
def draw_ways(program: Program, live: Sequence[dict[str, Any]], labels: Sequence[str] = ()) -> Figure:
    """Draw how long each way takes, as a share of the first: here, and on the H200."""
    kept = [found for way in program.ways if (found := recorded.program(program.name, way))]
    names = [f"{way}: {text}" for way, text in zip(program.ways, labels, strict=True)] if labels else [*program.ways]
    here, there = label("here", "本机"), label("H200, recorded", "H200，录制")
    sources = [(name, found) for name, found in ((here, live), (there, kept)) if found]
    figure = new_figure(0.8 + 0.32 * len(program.ways) * len(sources))
    for place, (name, found) in enumerate(sources, start=1):
        ax = figure.add_subplot(len(sources), 1, place)
        took = {measured["way"]: measured["median_ms"] for measured in found}
        shares = [100 * took.get(way, 0) / took[program.problem] for way in program.ways]
        bars = ax.barh(names, shares, color=HERE if name == here else H200)
        needs = label("needs a GPU", "需要 GPU")
        ax.bar_label(bars, [f"{took[way]:.3g} ms" if way in took else needs for way in program.ways], padding=3)
        ax.set(title=name, xlim=(0, 1.15 * max(shares)))
        ax.invert_yaxis()
    ax.set_xlabel(label("step time, % of way a", "一步的时间，以方式 a 为 100%"))
    return figure


@drawn
def draw_time_by_size(here: dict[str, Any]) -> Figure:
    """Draw the time of x + 1 against the bytes it moves: a floor of launching, then a slope of bandwidth."""
    figure = new_figure(3.0)
    ax = figure.subplots()
    kept = recorded.first_look() or {}
    one, many = label("one at a time", "每次计时一个"), label("50 at a time", "每次计时 50 个")
    series = [
        (here["time_by_size"], HERE, "o", f"{here['hardware']}, {label('here', '本机')}"),
        (kept.get("time_by_size", []), H200, "s", f"H200, {one}"),
        (kept.get("time_by_size_of_50", []), "#CC6677", "^", f"H200, {many}"),
    ]
    for points, colour, marker, name in series:
        if points:
            sizes, times = [p["bytes"] for p in points], [1e3 * p["median_ms"] for p in points]
            ax.plot(sizes, times, marker, color=colour, label=name, markersize=4)
    ax.set(xscale="log", yscale="log", title="torch.add(x, 1)")
    ax.set(xlabel=label("bytes read and written", "读写的字节数"), ylabel=label("microseconds", "微秒"))
    ax.legend(frameon=False)
    return figure


@drawn
def draw_copies() -> Figure | None:
    """Draw bytes a second by route, on the H200."""
    found = recorded.first_look()
    if not found:
        return None
    figure = new_figure(1.9)
    ax = figure.subplots()
    routes = found["copies"]
    bars = ax.barh(list(routes), [rate / 1e9 for rate in routes.values()], color=H200)
    ax.bar_label(bars, [f"{rate / 1e9:,.1f}" for rate in routes.values()], padding=3)
    ax.set(xscale="log", xlabel=label("GB/s (logarithmic)", "GB/s（对数坐标）"), xlim=(1, 2e4))
    ax.invert_yaxis()
    return figure


@drawn
def draw_schedules(schedules: dict[str, Schedule]) -> Figure:
    """Draw which steps a schedule skips, waits, warms up and records."""
    looks = {"skip": "#EEEEEE", "wait": "#BBBBBB", "warm up": "#DDCC77", "record": "#332288"}
    names = {"skip": "跳过", "wait": "等待", "warm up": "预热", "record": "记录"}
    figure = new_figure(0.9 + 0.34 * len(schedules))
    ax = figure.subplots()
    for lane, schedule in enumerate(schedules.values()):
        cycle = [("wait", schedule.wait), ("warm up", schedule.warmup), ("record", schedule.active)]
        start = 0
        for stretch, steps in [("skip", schedule.skip_first), *(cycle * schedule.repeat)]:
            ax.barh(lane, steps, left=start, color=looks[stretch], edgecolor="white", linewidth=0.5, height=0.7)
            start += steps
    ax.set(yticks=range(len(schedules)), yticklabels=list(schedules), xlabel=label("training step", "训练步"))
    ax.invert_yaxis()
    handles = [ax.barh(0, 0, color=colour, label=label(name, names[name])) for name, colour in looks.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
    return figure


@drawn
def draw_kernels_on_roofline(points: dict[str, dict[str, float]], ceilings: dict[str, Any]) -> Figure:
    """Draw kernels under the roofs of the machine. points: name -> flops, bytes, seconds."""
    bandwidth = ceilings["dram_bytes_per_second"]
    tensor, fp32 = label("tensor cores, bf16", "张量核心，bf16"), "float32"
    roofs = {tensor: ceilings["tensor_flops_per_second"], fp32: ceilings["fp32_flops_per_second"]}
    figure = new_figure(3.2)
    ax = figure.subplots()
    intensities = [2 ** (n / 8) for n in range(-48, 97)]
    for (name, roof), style in zip(roofs.items(), ("-", "--"), strict=True):
        heights = [min(bandwidth * i, roof) / 1e12 for i in intensities]
        ax.plot(intensities, heights, style, color="#777777", linewidth=1)
        text = label("ridge", "拐点")
        end = (intensities[-1], roof / 1e12)
        ax.annotate(name, end, xytext=(0, 3), textcoords="offset points", ha="right", va="bottom", fontsize=7)
        where = (roof / bandwidth, roof / 1e12)
        ax.annotate(f"{text} {where[0]:.0f}", where, xytext=(-4, 4), textcoords="offset points", ha="right", fontsize=7)
    for number, (name, point) in enumerate(points.items()):
        intensity, rate = point["flops"] / point["bytes"], point["flops"] / point["seconds"] / 1e12
        look = {"color": METHOD_COLOURS[number + 1], "marker": METHOD_MARKERS[number]}
        ax.plot(intensity, rate, linestyle="none", label=name, **look)
    ax.set(xscale="log", yscale="log", ylabel="TFLOP/s")
    ax.set_xlabel(label("FLOP for each byte of DRAM", "每个 DRAM 字节的 FLOP"))
    ax.legend(frameon=False, loc="lower right")
    return figure


@drawn
def draw_bars(values: dict[str, dict[str, float]], xlabel: str, *, most: int = 8, limit: float = 0) -> Figure:
    """Draw a panel of bars for each kernel: its `most` largest values, to a common `limit` if there is one."""
    figure = new_figure(0.5 + 0.2 * most * ((len(values) + 1) // 2))
    for place, (name, found) in enumerate(values.items(), start=1):
        ax = figure.add_subplot((len(values) + 1) // 2, 2, place)
        shown = dict(sorted(found.items(), key=lambda item: -item[1])[:most])
        bars = ax.barh(list(shown), list(shown.values()), color=H200)
        ax.bar_label(bars, [f"{value:.1f}" for value in shown.values()], padding=2, fontsize=7)
        ax.set(title=name, xlim=(0, 1.12 * limit or 1.2 * max([*shown.values(), 1e-9])))
        ax.tick_params(axis="x", labelbottom=place > len(values) - 2 or not limit)
        ax.xaxis.set_major_locator(MaxNLocator(4, prune="upper"))
        ax.invert_yaxis()
    figure.supxlabel(xlabel, fontsize=8)
    return figure


@drawn
def draw_card(log: Sequence[dict[str, str]]) -> Figure:
    """Draw power, temperature and clock of the card over time, from nvidia-smi's log."""
    column = {name.split()[0]: name for name in log[0]}
    seconds = [0.25 * number for number in range(len(log))]
    panels = (
        ("power.draw", label("power, W", "功率，W"), H200),
        ("temperature.gpu", "°C", "#CC6677"),
        ("clocks.current.sm", label("SM clock, MHz", "SM 时钟，MHz"), "#117733"),
    )
    figure = new_figure(3.4)
    axes = figure.subplots(len(panels), 1, sharex=True)
    for ax, (name, said, colour) in zip(axes, panels, strict=True):
        ax.plot(seconds, [float(line[column[name]]) for line in log], color=colour)
        ax.set(ylabel=said)
        ax.set_ylim(bottom=0)
    axes[-1].set(xlabel=label("seconds", "秒"))
    return figure


@drawn
def draw_collectives(series: dict[str, list[dict[str, float]]]) -> Figure:
    """Draw the time of all_reduce against the bytes it reduces."""
    figure = new_figure(2.6)
    ax = figure.subplots()
    for number, (name, points) in enumerate(series.items()):
        sizes, times = [p["bytes"] for p in points], [1e3 * p["median_ms"] for p in points]
        ax.plot(sizes, times, color=(HERE, H200)[number % 2], marker="os"[number % 2], label=name, markersize=4)
    ax.set(xscale="log", yscale="log", xlabel=label("bytes", "字节"), ylabel=label("microseconds", "微秒"))
    ax.legend(frameon=False)
    return figure


@drawn
def draw_lines(series: dict[str, Sequence[float]], xlabel: str, ylabel: str) -> Figure:
    """Draw a line for each name, over steps."""
    figure = new_figure(2.2)
    ax = figure.subplots()
    for number, (name, values) in enumerate(series.items()):
        ax.plot(
            range(1, len(values) + 1), values, color=("#CC6677", H200)[number % 2], marker="os"[number % 2], label=name
        )
    ax.set(xlabel=xlabel, ylabel=ylabel)
    ax.legend(frameon=False)
    return figure


def show(figure: Figure | None, en: str, zh: str) -> None:
    """Show a picture with its caption; a plain script only prints the caption."""
    caption = say(en, zh)
    if figure is None:
        print(f"{caption}: {recorded.NOT_RECORDED}")
        return
    try:
        from IPython import get_ipython
    except ImportError:
        get_ipython = lambda: None  # noqa: E731
    if get_ipython() is None:
        print(say(f"(a picture: {caption})", f"（图：{caption}）"))
        return
    from IPython.display import Image, Markdown, display

    png = io.BytesIO()
    # Tight: no label is cut off, however long it is.
    figure.savefig(png, format="png", dpi=110, bbox_inches="tight", pad_inches=0.08, metadata={"Software": "dpscope"})
    display(Image(data=png.getvalue(), alt=caption))
    display(Markdown(f"*{caption}*"))


def tell_section(section: str, *reports: str, metrics: Sequence[str] = (), advice: bool = True) -> None:
    """Print a section of ncu's Details page for several reports side by side, and what ncu's rules say of each."""
    found = {name: kept for name in reports if (kept := recorded.details(name))}
    if not found:
        print(f"{section}: {recorded.NOT_RECORDED}")
        return
    tables = {name: kept.section(section) for name, kept in found.items()}
    listed = metrics or list(dict.fromkeys(m for table in tables.values() for m in table.get("metric", [])))
    lines = [[section, *found]]
    for metric in listed:
        rows = [table[table["metric"] == metric] for table in tables.values()]
        # Each in the unit that ncu chose.
        cells = [f"{row.iloc[0]['value']} {row.iloc[0]['unit']}".strip() if len(row) else "—" for row in rows]
        lines.append([metric, *cells])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for first, *cells in lines:
        print(f"{first:{widths[0]}}" + "".join(f"{cell:>{w + 2}}" for cell, w in zip(cells, widths[1:], strict=True)))
    for name, kept in found.items():
        for sentence in kept.advice_on(section)[: int(advice)]:
            said = textwrap.shorten(f"ncu says of {name}: {sentence}", 330, placeholder=" …")
            print("\n" + textwrap.fill(said, 90))
