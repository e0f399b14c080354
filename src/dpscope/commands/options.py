"""Options that several subcommands share."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, TypeVar

import click

from dpscope.errors import UserError
from dpscope.numbers import WholeNumber
from dpscope.results.store import require_writable
from dpscope.vocabulary.instruments import INSTRUMENTS, Option
from dpscope.vocabulary.settings import FLAGS, REPEATS, SETTINGS, flag_of
from dpscope.workloads.configs import (
    ATTENTIONS,
    MODEL_SIZES,
    NORMS,
    PRESETS,
    WorkloadConfig,
    config_from_file,
    config_from_json,
    make_config,
    parse_lora,
    with_lora,
    workload_at,
)

F = TypeVar("F", bound=Callable[..., Any])


class CommaList(click.ParamType):  # type: ignore[type-arg]  # generic only in newer versions of click
    """Option type of values separated by commas, such as `8,16`."""

    def __init__(self, item: type) -> None:
        self.item = item
        self.name = "LIST"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[Any]:
        if not isinstance(value, str):
            return list(value)
        parts = [part.strip() for part in value.split(",")]
        if not all(parts):
            self.fail(f"{value!r} has an empty part: separate values by single commas", param, ctx)
        try:
            return [self.item(part) for part in parts]
        except ValueError:
            self.fail(f"{value!r} is not a list of whole numbers such as 8,16", param, ctx)


ABOVE_ZERO = click.FloatRange(min=0, min_open=True)

DEFAULT_MODEL = "tiny"


def _apply(function: F, options: list[Callable[[F], F]]) -> F:
    for option in reversed(options):
        function = option(function)
    return function


def json_option(function: F) -> F:
    """Add `--json FILE`; docs/schemas has a JSON Schema for what each command writes."""
    decorate: Callable[[F], F] = click.option(
        "--json",
        "json_file",
        type=click.Path(path_type=Path, dir_okay=False),
        callback=_json_file,
        help="Write everything here, for scripts; docs/schemas describes it. - is standard output.",
    )
    return decorate(function)


STANDARD_OUTPUT = Path("-")


def _json_file(context: click.Context, option: click.Parameter, path: Path | None) -> Path | None:
    """Refuse a file that cannot be written. Beside JSON on standard output, text for people goes to standard error."""
    if path == STANDARD_OUTPUT:
        context.meta[__name__] = sys.stdout
        context.with_resource(redirect_stdout(sys.stderr))
        return path
    return require_folder(path)


def require_folder(path: Path | None) -> Path | None:
    """Refuse a file that cannot be written, before minutes are spent."""
    if path is not None:
        if path == STANDARD_OUTPUT:
            raise UserError("only --json writes to standard output (-): give the name of a file")
        if not path.parent.is_dir():
            raise UserError(f"cannot write {path}: there is no folder {path.parent}")
        require_writable(path)
    return path


def write_json(path: Path, text: str) -> None:
    if path == STANDARD_OUTPUT:
        click.get_current_context().meta[__name__].write(text)
        return
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None


def workload_options(function: F) -> F:
    """Add the options of a workload: --model, --hf-config or --workload, its dimensions, and adapters."""
    sizes = [
        click.option(flag_of(name), type=int, help=f"Instead of the preset's {name.replace('_', ' ')}.")
        for name in MODEL_SIZES
    ]
    return _apply(
        function,
        [
            click.option("--model", metavar="NAME", help=f"{', '.join(PRESETS)} [default: {DEFAULT_MODEL}]."),
            click.option(
                "--hf-config",
                metavar="FILE",
                help="Any Hugging Face architecture: its config.json, or that text; random weights, no download.",
            ),
            click.option(
                "--workload",
                metavar="FILE.py:FUNCTION",
                help="Your own: a function that returns a dpscope.Workload; also package.module:function.",
            ),
            click.option(
                "--lora",
                metavar="SETTINGS",
                help="Train adapters on the model instead of the model: r=8,alpha=16,target=q_proj,v_proj.",
            ),
            *sizes,
            click.option(
                "--attention",
                type=click.Choice(ATTENTIONS),
                help="sdpa: four Linears and scaled_dot_product_attention; opacus: DPMultiheadAttention.",
            ),
            click.option("--norm", type=click.Choice(NORMS), help="Normalisation of cnn and resnet."),
        ],
    )


def setting_option(name: str, *, one: bool = False, **instead: Any) -> Callable[[F], F]:
    """Return the flag of a setting; `one`: it takes a single value here; `instead` replaces its help text."""
    setting = SETTINGS[name]
    several = "" if one else setting.several
    default = setting.default if setting.flag_default is None else setting.flag_default
    kind: dict[str, Any] = {"type": type(default), "show_default": True}
    if isinstance(default, bool) and several:
        kind = {"type": CommaList(str), "default": "off", "is_flag": False, "flag_value": "on", "show_default": True}
    elif isinstance(default, bool):
        kind = {"is_flag": True}
    elif several:
        kind |= {"type": CommaList(type(default)), "default": str(default)}
    said = f"{setting.help} {setting.flag} {several} measures both." if several else setting.help
    return click.option(setting.flag, **{"default": default, "help": said, **kind, **instead})


def instrument_options(name: str) -> Callable[[F], F]:
    """Return the options of an instrument, from its entry in `INSTRUMENTS`."""
    return lambda function: _apply(
        function, [_instrument_option(key, option) for key, option in INSTRUMENTS[name].options.items()]
    )


def _instrument_option(name: str, option: Option) -> Callable[[F], F]:
    flag, default = flag_of(name), option.default
    if default is False:
        return click.option(flag, is_flag=True, help=option.help)
    kind: Any = click.Choice(option.choices) if option.choices else str
    if option.check is not None:
        kind = click.IntRange(min=option.check.least) if isinstance(option.check, WholeNumber) else ABOVE_ZERO
    return click.option(
        flag, type=kind, default=default, show_default=bool(default), metavar=option.metavar, help=option.help
    )


def step_options(function: F) -> F:
    """Add the options of a step: number format, optimizer, privacy, seed, device."""
    return _apply(function, [setting_option(name) for name in FLAGS if name not in REPEATS])


def sweep_options(function: F) -> F:
    """Return how a sweep runs and where its results go."""
    return _apply(
        function,
        [
            *(setting_option(name) for name in REPEATS),
            click.option("--out", type=click.Path(path_type=Path), help="Folder for results [default: a new one]."),
            click.option("--resume", is_flag=True, help="Keep finished rows in --out and measure the rest."),
            click.option("--overwrite", is_flag=True, help="Replace the results in --out."),
            click.option(
                "--timeout", type=ABOVE_ZERO, default=1800.0, show_default=True, help="Seconds a row may take."
            ),
            click.option("--memory-limit", type=ABOVE_ZERO, help="GiB a row may allocate on the CPU."),
        ],
    )


def workload_from(options: dict[str, Any]) -> WorkloadConfig:
    """Take the workload's options out of a command's keyword arguments."""
    sizes = {name: options.pop(name) for name in ("attention", "norm", *MODEL_SIZES)}
    model, file, own = (options.pop(name) for name in ("model", "hf_config", "workload"))
    lora = options.pop("lora")
    if sum(value is not None for value in (model, file, own)) > 1:
        raise UserError("--model, --hf-config and --workload each say what is trained: give one of them")
    if own is not None or file is not None:
        config: WorkloadConfig
        if own is not None:
            config = workload_at(own)
        else:  # a file, or its text, which begins with a brace
            config = config_from_json(file) if file.lstrip().startswith("{") else config_from_file(Path(file))
        config = config.resized(**{name: value for name, value in sizes.items() if value is not None})
    else:
        config = make_config(model or DEFAULT_MODEL, **sizes)
    return config if lora is None else with_lora(config, parse_lora(lora))
