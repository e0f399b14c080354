"""Pages spell names as their owners do, and print commands that exist."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import click
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpscope.flash
from dpscope.cli import main
from tests import ROOT

PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "benchmarks/results/*.md", "tutorials/**/*.md", "tutorials/**/*.ipynb")
    for path in ROOT.glob(pattern)
)
PLACES = (ROOT, ROOT / "src" / "dpscope")
# As their owners write them; a space may be a line's end.
NAMES = (
    *(
        "dpscope",
        "Opacus",
        "PyTorch",
        "TensorBoard",
        "Hugging Face",
        "Perfetto",
        "Triton",
        "NumPy",
        "Jupyter",
        "Chromium",
    ),
    *(
        "NVIDIA",
        "Nsight Compute",
        "Nsight Systems",
        "NVTX",
        "CUDA",
        "cuDNN",
        "cuBLAS",
        "CUTLASS",
        "CUPTI",
        "DRAM",
        "Hopper",
    ),
    *("DP-SGD", "LoRA", "BatchNorm", "LayerNorm", "GroupNorm", "RMSNorm", "GPT-2", "Llama", "ViT", "BERT"),
    *("GitHub", "PyPI", "Linux", "LaTeX", "JavaScript", "Markdown", "ECharts", "SQLite", "JSON", "Philox"),
)
METHOD_ALIASES = {"dpsgd"}
PATTERNS = {
    name: re.compile(
        rf"(?<![\w./@:-]){re.sub('[ -]', '[ -]?', name)}(?![\w/:=-]|\.\w)".replace(" ", r"\s"), re.IGNORECASE
    )
    for name in NAMES
}


def text_of(page: Path) -> str:
    """A page's Markdown; of a notebook, that of its cells of text."""
    text = page.read_text(encoding="utf-8")
    if page.suffix != ".ipynb":
        return text
    cells = json.loads(text)["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def prose_of(text: str) -> str:
    """Without code, addresses, HTML and front matter."""
    text = re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.DOTALL)
    text = re.sub(r"^( *)(```+|~~~+).*?^\1\2 *$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^(    |\t).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"<!--.*?-->|<[^>]+>|(`+).*?\1", " ¦ ", text, flags=re.DOTALL)
    return re.sub(r"\]\([^)]*\)|https?://\S+", "] ¦ ", text)


def misspelt(prose: str) -> list[str]:
    """Names in another form. Packages go by their own, in small letters, where a version follows: opacus 1.6."""
    wrong = []
    for name, pattern in PATTERNS.items():
        for found in pattern.finditer(prose):
            is_package = found[0].islower() and re.match(r"\s\d", prose[found.end() :])
            if re.sub(r"\s", " ", found[0]) != name and not is_package and found[0] not in METHOD_ALIASES:
                wrong.append(found[0])
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_names_are_spelt_as_their_owners_do(page):
    assert misspelt(prose_of(text_of(page))) == []


def test_a_misspelt_name_is_found_in_prose_alone():
    wrong = "Pytorch, nsight\ncompute, HuggingFace, Dpscope and DPSGD; Github."
    assert misspelt(prose_of(wrong)) == ["Dpscope", "Pytorch", "HuggingFace", "nsight\ncompute", "DPSGD", "Github"]
    right = "PyTorch, Nsight\nCompute, [Opacus](https://opacus.ai), `import opacus`, dpscope.flash, opacus_suite/"
    assert misspelt(prose_of(right)) == []


def commands_in(text: str) -> list[str]:
    """Lines of shell that begin with `dpscope`, with the lines that continue them."""
    blocks = re.findall(r"^```(?:bash|sh|shell)\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line for line in lines if re.match(r"\s*(?:[A-Z_]+=\S+ )*dpscope ", line)]


def usage_error(line: str) -> str:
    """What dpscope says of a command without running it; empty where it would begin."""
    words = shlex.split(line, comments=True)
    words = [word for word in words[words.index("dpscope") + 1 :] if word not in ("…", "...")]
    words = words[: next((at for at, word in enumerate(words) if word in ("|", ">", "&&", ";")), None)]
    try:
        context = main.make_context("dpscope", list(words))
        name, command, rest = main.resolve_command(context, [*context._protected_args, *context.args])
        assert name and command
        command.make_context(name, rest, parent=context).close()
    except click.exceptions.Exit:  # --help
        return ""
    except click.UsageError as error:
        return "" if "does not exist" in error.format_message() else error.format_message()
    return ""


@pytest.mark.parametrize("page", [page for page in PAGES if commands_in(text_of(page))], ids=lambda page: page.name)
def test_commands_on_a_page_exist_with_their_flags(page):
    errors = {line: usage_error(line) for line in commands_in(text_of(page))}
    assert {line: error for line, error in errors.items() if error} == {}


@pytest.mark.parametrize(
    "line", ["dpscope comprae", "dpscope compare --modle tiny", "dpscope compare --batch-size eight", "dpscope check x"]
)
def test_a_command_that_does_not_exist_is_found(line):
    assert usage_error(line)


def missing_files(text: str) -> list[str]:
    """Files and folders that are named in code, from the repository's root or the package's, and are not there."""
    folders = "|".join(path.name for root in PLACES for path in root.iterdir() if path.is_dir())
    named = re.findall(rf"`((?:{folders})/(?:[\w.-]+/)*(?:[\w-]+\.(?:py|sh|md|js)|(?<=/)))`", text)
    files = [name for name in named if Path(name).stem not in ("NAME", "KIND")]  # of recipes
    return [name for name in files if not any((root / name).exists() for root in PLACES)]


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=lambda page: str(page.relative_to(ROOT))
)
def test_files_that_a_page_names_are_there(page):
    assert missing_files(text_of(page)) == []


def test_a_file_that_is_gone_is_found():
    text = "`tests/unit/`, `tests/gone/`, `flash/engine.py`, `flash/gone.py`, `scripts/gone.sh`, `sweep/report.html`"
    assert missing_files(text) == ["tests/gone/", "flash/gone.py", "scripts/gone.sh"]


def missing_names(text: str) -> list[tuple[str, str]]:
    """Constants that a step of a recipe, `1. `file`: …`, names and that are not in its file."""
    steps = re.findall(r"^\d\. `([\w/]+\.py)`(.*?)(?=^\d\. |^$)", text, re.MULTILINE | re.DOTALL)
    files = {name: ROOT / "src" / "dpscope" / name for name, _ in steps if "NAME" not in name}
    return [
        (name, constant)
        for name, step in steps
        if name in files
        for constant in re.findall(r"`(_?[A-Z][A-Z_]+)`", step)
        if constant not in files[name].read_text(encoding="utf-8")
    ]


def test_names_in_the_recipes_are_in_the_files_of_their_steps():
    assert missing_names((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")) == []
    assert missing_names("1. `vocabulary/phases.py`: a line in `PHASES`,\n   or `GONE`.\n\n`BESIDE`\n") == [
        ("vocabulary/phases.py", "GONE")
    ]


def names_of_packages(text: str) -> list[tuple[str, str]]:
    """Files that the map of the larger packages names, `**`folder/`**` and lists below it, and that are not there."""
    part = text.partition("### Inside the larger packages")[2].partition("\n### ")[0]
    sections = re.findall(r"^\*\*`(\w+)/`\*\*$(.*?)(?=^\*\*|\Z)", part, re.MULTILINE | re.DOTALL)
    package = ROOT / "src" / "dpscope"
    named = [(folder, name) for folder, lists in sections for name in re.findall(r"`((?:\w+/)*\w+\.py)`", lists)]
    return [
        (folder, name)
        for folder, name in named
        if not (package / name).is_file() and not list((package / folder).rglob(name))
    ]


def test_the_map_of_packages_names_files_that_are_there():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert names_of_packages(page) == []
    assert names_of_packages("### Inside the larger packages\n\n**`audit/`**\n\n- `loop.py`, `gone.py`\n") == [
        ("audit", "gone.py")
    ]


def python_in(page: str) -> list[str]:
    return re.findall(
        r"^```python\n(.*?)^```", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )


def test_getting_started_runs_as_it_is_printed():
    """The two blocks: a workload of one's own, and a private training loop."""
    workload, loop = python_in("getting-started.md")
    names: dict[str, Any] = {}
    exec(workload, names)
    made = names["make"](4)
    losses = made.loss(made.model(), made.batch(0, torch.device("cpu")))
    assert losses.shape == (4,)
    exec(loop, names)
    assert names["privacy_engine"].get_epsilon(delta=1e-5) > 0
    assert isinstance(names["optimizer"], dpscope.flash.DPFlashOptimizer)


GIVEN = "module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0"


def a_newcomers_names(views: bool) -> dict[str, Any]:
    """What a reader has: a model, its optimizer, a loader, a loss and a batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))
    x, y = torch.randn(64, *([4, 1, 4, 4] if views else [16])), torch.randint(3, (64,))
    return {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "loader": DataLoader(TensorDataset(x, y), batch_size=8),
        "loss_fn": nn.CrossEntropyLoss(),
        **{"x": torch.randn(8, 16), "y": y[:8], "F": F, "user_ids": torch.arange(8) // 2},
    }


@pytest.mark.parametrize("page", ["flash.md", "compiled.md", "cuda-graphs.md", "padding.md"])
@pytest.mark.filterwarnings("ignore")
def test_code_of_pages_about_training_runs_as_it_is_printed(page, monkeypatch):
    """Blocks of a page go on where the last one ended, but for those that make a model private."""
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self, **options: self)
    names: dict[str, Any] = {}
    for block in python_in(page):
        for code in block.strip().split("\n" if "clipping=" in block else "\0"):  # each of these lines is a choice
            if "make_private(" in code or "FlashEngine(" in code:  # of another model
                names |= a_newcomers_names(views="views" in code)
            bound = "" if "max_grad_norm" in code else ", max_grad_norm=1.0"
            exec(code.replace("(...", f"({GIVEN}{bound}").replace("0.5, ...]", "0.5, 0.1, 0.5]"), names)


def test_getting_started_prints_the_same_code_in_both_languages():
    def without_comments(page: str) -> list[str]:
        return [re.sub("#.*", "", block) for block in python_in(page)]

    assert without_comments("getting-started.md") == without_comments("zh/getting-started.md")
    english, chinese = (
        (ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("getting-started.md", "zh/getting-started.md")
    )
    assert commands_in(english) == commands_in(chinese)
