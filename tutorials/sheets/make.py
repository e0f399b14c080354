"""Draw the two sheets to print, in both languages, as SVG and PDF: `python tutorials/sheets/make.py`.

The PDF is the SVG, printed by Chromium on one page of A4, landscape. Text is text: it can be searched and copied.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from html import escape
from pathlib import Path

HERE = Path(__file__).resolve().parent
WIDTH, HEIGHT, MARGIN = 1122, 793, 24  # A4, landscape, in CSS pixels
LINE = 37  # from one command to the next
INK, BLUE, PALE, GREY = "#222222", "#332288", "#F1F1F8", "#666666"
SANS = "'Noto Sans CJK SC','PingFang SC','Microsoft YaHei','DejaVu Sans',Arial,sans-serif"
MONO = "'DejaVu Sans Mono','Noto Sans Mono CJK SC',Menlo,Consolas,monospace"

Text = tuple[str, str]  # English, Chinese
Box = tuple[Text, list[tuple[str, Text]]]  # a title, and lines: code (may be empty), what it is for

CHEAT_TITLE: Text = ("Profiling PyTorch on a GPU: the commands", "GPU 上 PyTorch 性能分析：命令速查")
CHEAT: list[Box] = [
    (
        ("1  Time it first, without a profiler", "1  先计时，不带分析器"),
        [
            (
                "torch.cuda.synchronize(); t = time.perf_counter(); …",
                ("wait before both readings of the clock", "两次看表之前都要同步"),
            ),
            (
                "torch.cuda.Event(enable_timing=True)",
                ("or events; median of many steps, after a warm-up", "或用事件；预热后取多步的中位数"),
            ),
            (
                "dpscope compare --model … --batch-size …",
                ("private training next to ordinary training", "差分隐私训练与普通训练对比"),
            ),
        ],
    ),
    (
        ("2  torch.profiler: which operators, who waits", "2  torch.profiler：哪些算子，谁在等"),
        [
            (
                "with profile(activities=[CPU, CUDA]) as p: step()",
                (
                    "record_shapes, profile_memory, with_stack, schedule",
                    "record_shapes、profile_memory、with_stack、schedule",
                ),
            ),
            (
                'p.key_averages().table(sort_by="self_cuda_time_total")',
                ("self: who works; total: where; # of Calls: too many?", "self：谁在干活；total：在哪里；次数：太多？"),
            ),
            ("p.key_averages(group_by_input_shape=True)", ("one mm is not another", "形状不同的 mm 是不同的工作")),
            (
                'p.export_chrome_trace("t.json.gz")',
                ("open at ui.perfetto.dev: W S zoom, A D move", "在 ui.perfetto.dev 打开：W S 缩放，A D 移动"),
            ),
        ],
    ),
    (
        ("3  nsys: when, and gaps", "3  nsys：何时，空隙在哪里"),
        [
            ("nsys profile --trace=cuda,nvtx --sample=none", ("then, on the same line:", "接着写在同一行：")),
            (
                "  --capture-range=cudaProfilerApi -o R python …",
                ("only between profiler.start() and stop()", "只录 profiler.start() 与 stop() 之间"),
            ),
            ("nsys launch --session-new=S …; nsys start; nsys stop", ("by hand, while it runs", "运行中手动录制")),
            (
                "nsys stats R.nsys-rep; nsys export --type=sqlite",
                ("tables; a database for Python", "表格；供 Python 读取的数据库"),
            ),
            (
                "torch.cuda.nvtx.range_push(name) … range_pop()",
                ("your words on the timeline", "在时间线上显示你的名字"),
            ),
            (
                "nsys-ui R.nsys-rep",
                ("look: holes, red waits, copies beside kernels?", "看：空隙、等待、拷贝是否与 kernel 并行"),
            ),
        ],
    ),
    (
        ("4  ncu: why one kernel is slow", "4  ncu：一个 kernel 为什么慢"),
        [
            (
                "ncu --profile-from-start off --launch-count 1",
                ("one launch after the warm-up; then:", "预热后的一次启动；接着："),
            ),
            ("  --set basic|full -o R python …", ("basic first; full for one kernel", "先 basic；单个 kernel 用 full")),
            ("--kernel-name regex:… --launch-skip N", ("which kernel", "看哪个 kernel")),
            ("--metrics dram__bytes_read.sum,…", ("exact counters, often one pass", "指定计数器，常常只要一遍")),
            ("--replay-mode app-range", ("one row for a whole step", "整个训练步一行结果")),
            (
                "ncu --import R.ncu-rep --page details|raw --csv",
                ("as text; ncu-ui R.ncu-rep for the window", "文本；ncu-ui R.ncu-rep 打开界面"),
            ),
        ],
    ),
    (
        ("5  Read an ncu report in this order", "5  按这个顺序读 ncu 报告"),
        [
            (
                "Speed of Light",
                (
                    "compute or memory > 80 %: that is the limit; both < 60 %: latency",
                    "计算或内存 > 80 %：就是瓶颈；都 < 60 %：延迟",
                ),
            ),
            ("Memory Workload", ("DRAM, L2 or L1? hit rates count stores too", "DRAM、L2 还是 L1？命中率也计入写入")),
            (
                "Compute Workload",
                ("busiest pipe; tensor pipe idle = wrong format", "最忙的流水线；张量流水线空闲 = 格式不对"),
            ),
            ("Warp State", ("only if nothing is at its limit", "没有单元到上限时才看")),
            ("Occupancy", ("a means, not an aim", "是手段，不是目的")),
        ],
    ),
    (
        ("6  The machine and several GPUs", "6  机器与多 GPU"),
        [
            (
                "nvidia-smi --query-gpu=power.draw,clocks.sm,…",
                ("throttled? utilization.gpu says little", "降频了吗？utilization.gpu 说明不了什么"),
            ),
            (
                "nvidia-smi topo -m",
                ("NVLink (NV18), PCIe (PHB), across sockets (SYS)", "NVLink（NV18）、PCIe（PHB）、跨插槽（SYS）"),
            ),
            (
                "torchrun --nproc-per-node=8 train.py",
                ("trace every rank; the short collective is the late rank", "录下每个 rank；集合通信短的是迟到的"),
            ),
            ("NCCL_DEBUG=INFO", ("which path NCCL chose", "NCCL 选了哪条通路")),
        ],
    ),
]

SYMPTOMS_TITLE: Text = ("From symptom to tool to fix", "从现象到工具再到改法")
COLUMNS: list[Text] = [
    ("what you see", "现象"),
    ("look with", "用什么看"),
    ("and find", "会看到"),
    ("what to do", "怎么改"),
]
SYMPTOMS: list[list[Text]] = [
    [
        ("GPU idle, host busy", "GPU 空闲，主机忙"),
        ("trace, nsys", "trace、nsys"),
        ("many short kernels, gaps between", "大量短 kernel，中间有空隙"),
        (
            "fuse, foreach, torch.compile, CUDA graph, larger batch",
            "融合、foreach、torch.compile、CUDA graph、加大批次",
        ),
    ],
    [
        ("GPU idle again and again within a step", "一步之内 GPU 反复空闲"),
        ("trace: CUDA calls", "trace：CUDA 调用"),
        ("cudaStreamSynchronize under aten::item or nonzero", "aten::item 或 nonzero 下的 cudaStreamSynchronize"),
        ("keep values on the device; fixed sizes; read rarely", "数值留在设备上；固定大小；少读"),
    ],
    [
        ("GPU idle at the start of a step", "一步开头 GPU 空闲"),
        ("nsys: host threads", "nsys：主机线程"),
        ("the loader or Python prepares data", "数据加载或 Python 在准备数据"),
        ("workers, prefetch, prepare on the GPU", "增加 worker、预取、在 GPU 上处理"),
    ],
    [
        ("long copies to the device", "到设备的拷贝很长"),
        ("nsys: copy lanes", "nsys：拷贝行"),
        ("pageable memory, nothing beside it", "可分页内存，没有重叠"),
        ("pin_memory, non_blocking, a stream of their own", "pin_memory、non_blocking、单独的流"),
    ],
    [
        ("one kernel dominates, DRAM full", "一个 kernel 占主导，DRAM 满"),
        ("ncu: Speed of Light", "ncu：Speed of Light"),
        ("memory > 80 %, compute low", "内存 > 80 %，计算低"),
        ("move fewer bytes: fuse, bf16, recompute", "少搬字节：融合、bf16、重算"),
    ],
    [
        ("a product is slow", "矩阵乘慢"),
        ("ncu: Compute Workload", "ncu：Compute Workload"),
        ("FMA busy, tensor pipe idle", "FMA 忙，张量流水线空闲"),
        ("bf16 or TF32; shapes in multiples of 8", "bf16 或 TF32；维度取 8 的倍数"),
    ],
    [
        ("a kernel is slow, nothing is full", "kernel 慢，但什么都没满"),
        ("ncu: Warp State, Launch", "ncu：Warp State、Launch"),
        ("stalls, few waves, scattered sectors", "停顿、波数少、扇区分散"),
        ("more blocks, neighbouring addresses, fewer barriers", "更多线程块、相邻地址、少用栅栏"),
    ],
    [
        ("a kernel that computes nothing is on top", "排第一的 kernel 不做运算"),
        ("torch's table", "torch 的表格"),
        ("aten::copy_, contiguous, to", "aten::copy_、contiguous、to"),
        ("keep one layout and one format; convert once", "保持一种布局和格式；只转换一次"),
    ],
    [
        ("out of memory at once", "一开始就显存不足"),
        ("dpscope memory, profile_memory", "dpscope memory、profile_memory"),
        ("which component is the peak", "峰值由什么组成"),
        ("checkpointing, smaller batch, another clipping method", "检查点重算、减小批次、换裁剪方法"),
    ],
    [
        ("out of memory after a while", "过一段时间显存不足"),
        ("memory_allocated() each step", "每步看 memory_allocated()"),
        ("it grows by the same amount", "每步增加同样多"),
        ("detach, no_grad, do not keep tensors in lists", "detach、no_grad、不要把张量存进列表"),
    ],
    [
        ("more GPUs, hardly faster", "加了 GPU，几乎没变快"),
        ("trace of every rank", "每个 rank 的 trace"),
        ("collectives alone on the timeline, or one late rank", "集合通信单独出现，或有一个 rank 迟到"),
        ("larger buckets or batch, overlap; fix the late rank", "更大的桶或批次、重叠；修好迟到的 rank"),
    ],
    [
        ("slower than yesterday", "比昨天慢"),
        ("nvidia-smi: clocks, power, temperature", "nvidia-smi：时钟、功率、温度"),
        ("throttled card, other processes", "卡被降频，有其他进程"),
        ("cool it, free it, compare in one run", "降温、清空、在同一次运行里比较"),
    ],
]


def text(
    x: float, y: float, said: str, size: float, *, font: str = SANS, colour: str = INK, weight: str = "normal"
) -> str:
    look = f'font-family="{font}" font-size="{size}" fill="{colour}" font-weight="{weight}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {look} xml:space="preserve">{escape(said)}</text>'


def rectangle(x: float, y: float, width: float, height: float, fill: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="4" fill="{fill}"/>'


def wide(said: str, size: float) -> float:
    """Return about how wide a text is: Chinese characters are as wide as high, others a little over half."""
    return sum(size if ord(character) > 0x2E80 else 0.56 * size for character in said)


def wrapped(said: str, size: float, room: float) -> list[str]:
    """Break a text into lines that fit: at spaces, and anywhere between Chinese characters."""
    lines, line = [], ""
    words = re.findall(r"[\u2e80-\uffff]|[^\u2e80-\uffff ]+| ", said)
    for word in words:
        if line and wide(line + word, size) > room:
            lines.append(line.strip())
            line = ""
        line += word
    return [*lines, line.strip()]


def page(title: str, parts: list[str], foot: str) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}">'
    background = f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
    titled = text(MARGIN, 40, title, 22, weight="bold", colour=BLUE)
    ending = text(MARGIN, HEIGHT - 14, foot, 9.5, colour=GREY)
    return "\n".join([head, background, titled, *parts, ending, "</svg>"]) + "\n"


def cheat_sheet(language: int) -> str:
    columns, gap, top = 2, 18, 58
    room = (WIDTH - 2 * MARGIN - gap * (columns - 1)) / columns
    parts, heights = [], [float(top)] * columns
    for title, lines in CHEAT:
        place = heights.index(min(heights))
        x, y = MARGIN + place * (room + gap), heights[place]
        height = 36 + LINE * len(lines)
        parts += [
            rectangle(x, y, room, height, PALE),
            text(x + 10, y + 20, title[language], 15, weight="bold", colour=BLUE),
        ]
        for number, (code, meaning) in enumerate(lines):
            base = y + 43 + LINE * number
            parts += [
                text(x + 10, base, code, 12.5, font=MONO),
                text(x + 22, base + 16, meaning[language], 12, colour=GREY),
            ]
        heights[place] += height + 10
    return page(CHEAT_TITLE[language], parts, FOOT[language])


def symptom_chart(language: int) -> str:
    starts, size = (0.0, 0.22, 0.42, 0.69), 11.5
    room = WIDTH - 2 * MARGIN
    parts = [rectangle(MARGIN, 56, room, 26, BLUE)]
    for start, column in zip(starts, COLUMNS, strict=True):
        parts.append(text(MARGIN + start * room + 8, 74, column[language], 13, weight="bold", colour="white"))
    step = (HEIGHT - 82 - 34) / len(SYMPTOMS)
    ends = [*starts[1:], 1.0]
    for number, row in enumerate(SYMPTOMS):
        y = 84 + step * number
        if number % 2 == 0:
            parts.append(rectangle(MARGIN, y, room, step - 2, PALE))
        for place, cell in enumerate(row):
            lines = wrapped(cell[language], size, (ends[place] - starts[place]) * room - 26)
            for line, said in enumerate(lines):
                base = y + step / 2 + 4 + 14 * (line - (len(lines) - 1) / 2)
                weight = "bold" if place == 0 else "normal"
                parts.append(text(MARGIN + starts[place] * room + 8, base, said, size, weight=weight))
            if place < 3:
                parts.append(text(MARGIN + ends[place] * room - 14, y + step / 2 + 4, "→", 12, colour=BLUE))
    return page(SYMPTOMS_TITLE[language], parts, FOOT[language])


FOOT: Text = (
    "dpscope tutorials. Times come from runs without a profiler; proportions and reasons from runs with one. "
    "To prove a fix, show that the results are equal.",
    "dpscope 教程。时间取自不带分析器的运行，比例和原因取自带分析器的运行。要证明改对了，就要证明结果相同。",
)
SHEETS = {"cheat-sheet": cheat_sheet, "symptoms": symptom_chart}


def print_to_pdf(svg: Path) -> None:
    """Print an SVG on one page with Chromium."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("Chromium is needed to print the PDF. Install it, for example with apt install chromium.")
    style = f"@page {{ size: {WIDTH}px {HEIGHT}px; margin: 0 }} body {{ margin: 0 }} svg {{ display: block }}"
    with tempfile.TemporaryDirectory() as folder:
        html = Path(folder) / "sheet.html"
        drawn = svg.read_text(encoding="utf-8")
        html.write_text(f"<!doctype html><meta charset='utf-8'><style>{style}</style>{drawn}", encoding="utf-8")
        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--no-pdf-header-footer",
            f"--user-data-dir={folder}/profile",
        ]
        printed = [f"--print-to-pdf={svg.with_suffix('.pdf')}", html.as_uri()]
        subprocess.run([chromium, *options, *printed], check=True, capture_output=True, timeout=120)


if __name__ == "__main__":
    for name, draw in SHEETS.items():
        for number, language in enumerate(("en", "zh")):
            file = HERE / f"{name}-{language}.svg"
            file.write_text(draw(number), encoding="utf-8")
            print_to_pdf(file)
            print(file.name, file.with_suffix(".pdf").name)
