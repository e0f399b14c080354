"""Lessons run from top to bottom, their numbers and claims come from committed results, and their commands exist."""

from __future__ import annotations

import importlib
import importlib.util
import re
import shlex
import subprocess
import sys
from functools import cache

import pytest
from click.testing import CliRunner

from dpscope.cli import main
from tests import ROOT
from tests.forked import run_forked
from tests.rows_forked import rows_forked

jupytext = pytest.importorskip("jupytext")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("nbclient")
InteractiveShell = pytest.importorskip("IPython.core.interactiveshell").InteractiveShell

TUTORIALS = ROOT / "tutorials"
ENGLISH = sorted(TUTORIALS.glob("[0-9][0-9]*-*.py"))
CHINESE = sorted((TUTORIALS / "zh").glob("[0-9][0-9]*-*.py"))
UNIT = r"(?:ms|µs|[KMGT]i?B(?:/s)?|[GT]FLOPs?(?:/s)?|×(?!\s?\d)|%|倍|毫秒|微秒)"
QUANTITY = re.compile(rf"(?<![\w.])([\d,]*\.?\d+)\s?{UNIT}(?![\w/])(?!\s*<!--)")
CHECKED = re.compile(r"([\d,]*\.?\d+)[^\d<>|]{0,16}<!-- = (.+?) -->")
CLAIMED = re.compile(r"<!-- holds: (.+?) -->")
COMMANDS = ("dpscope", "ncu", "nsys", "nvidia-smi", "nvcc", "python")
# Commands of dpscope that take seconds at most: they are run as printed. The others are held against its options,
# and run by tests of their own.
QUICK = ("report", "ncu-read", "--read", "--print-command", "--guide", "--help")


def by_name(path):
    return str(path.relative_to(TUTORIALS))


def load(name):
    spec = importlib.util.spec_from_file_location(f"tutorials_{name}", TUTORIALS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def build():
    return load("build")


@pytest.fixture
def recorded(monkeypatch):
    monkeypatch.syspath_prepend(str(TUTORIALS / "programs"))
    return importlib.import_module("recorded")


@pytest.fixture(scope="module")
def libraries():
    """What tutorials import, imported once."""
    for name in (
        "matplotlib.pyplot",
        "pandas",
        "torch",
        "dpscope.flash.opacus.privacy_engine",
        "dpscope.exactness.check",
    ):
        importlib.import_module(name)


@cache
def cells_of(source):
    return jupytext.read(source).cells


def prose_of(source):
    """The Markdown of a tutorial, without its code blocks and the table that benchmarks/headline.pys."""
    cells = [cell.source for cell in cells_of(source) if cell.cell_type == "markdown"]
    text = re.sub(r"<!-- headline: begin -->.*?<!-- headline: end -->", "", "\n\n".join(cells), flags=re.DOTALL)
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def commands_in(source):
    """Every command in a block of shell, one a line, without comments; lines that end in a backslash go on."""
    text = re.sub(r"^# ?", "", source.read_text(encoding="utf-8"), flags=re.MULTILINE)
    blocks = re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL)
    lines = [line.strip() for block in blocks for line in re.sub(r"\s*\\\n\s*", " ", block).splitlines()]
    return [re.sub(r"\s+#.*$", "", line) for line in lines if line and not line.startswith("#")]


def run_on_a_gpu(mark=""):
    """The commands of gpu_commands.txt, or those with a mark."""
    lines = (TUTORIALS / "programs" / "gpu_commands.txt").read_text(encoding="utf-8").splitlines()
    commands = [line for line in lines if line and not line.startswith("#") and line.startswith(mark)]
    return {command.lstrip("&! ").partition(": ")[2] for command in commands}


PRINTED = sorted({command for source in (*ENGLISH, *CHINESE) for command in commands_in(source)})


def test_every_lesson_is_there_in_both_languages_and_says_what_it_assumes_and_when_it_was_verified():
    assert [source.name.partition("-")[0] for source in ENGLISH] == ["01", "02", "03a", "03b", "04", "05", "06", "07"]
    for source in ENGLISH:
        text = prose_of(source)
        assert re.search(r"Last verified: \d{4}-\d\d-\d\d", text), source
        for part in ("**Level:**", "**Assumes:**", "**Time:**", "After it you can", "## What to remember"):
            assert part in text, (source, part)
    assert [source.name for source in CHINESE] == [source.name for source in ENGLISH]
    for source in CHINESE:
        text = prose_of(source)
        for part in ("最后验证：", "**难度**：", "**预备知识**：", "**时间**：", "读完之后你能够", "## 要记住的"):
            assert part in text, (source, part)


@pytest.mark.parametrize("source", [*ENGLISH, *CHINESE], ids=by_name)
def test_a_lesson_takes_about_as_long_to_read_as_it_says(source, build):
    said = re.search(r"(?:阅读约 )?(\d+) (?:minutes to read|分钟)", prose_of(source))
    assert abs(build.reading_minutes(source) - int(said.group(1))) <= 5


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("source", [*ENGLISH, TUTORIALS / "zh" / "03b-read-a-report.py"], ids=by_name)
@pytest.mark.usefixtures("libraries")
def test_a_lesson_runs_from_top_to_bottom(source, build, monkeypatch, tmp_path):
    """Cell by cell, as a notebook would, in a copy of this process: a kernel of its own would import torch again.

    One Chinese lesson is enough, the one with most pictures: the code of the others is the same.
    """
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(source.parent)
    cells = build.code_cells(build.notebook_of(source))

    def tutorial():
        shell = InteractiveShell.instance()
        with rows_forked():
            for cell in cells:
                # What a reader's lesson writes into the folder it was started from.
                shell.run_cell(cell.source.replace('Path("traces-of', f'Path("{tmp_path}/traces-of')).raise_error()

    done = run_forked(tutorial, seconds=170)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_a_notebook_is_built_by_running_it_in_a_kernel(build, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    code = nbformat.v4.new_code_cell("from programs import practice\nprint(practice.__name__)")
    notebook = build.run(nbformat.v4.new_notebook(cells=[code]))
    (cell,) = build.code_cells(notebook)
    assert cell.execution_count == 1
    assert cell.outputs[0].text == "programs.practice\n"


@pytest.mark.parametrize("source", [*ENGLISH, *CHINESE], ids=by_name)
def test_the_notebook_beside_a_source_is_made_from_it(source, build):
    kept = nbformat.read(source.with_suffix(".ipynb"), as_version=4)
    made = build.notebook_of(source)
    advice = f"run: python tutorials/build.py {source.name[:2]}"
    assert [cell.source for cell in kept.cells] == [cell.source for cell in made.cells], advice
    assert all(cell.execution_count for cell in build.code_cells(kept)), advice
    assert not re.search(r"/(home|root|work|Users)/", source.with_suffix(".ipynb").read_text(encoding="utf-8")), advice


@pytest.mark.parametrize("source", CHINESE, ids=by_name)
def test_the_chinese_lesson_has_the_code_of_the_english_one(source, build):
    chinese, english = (
        [cell.source for cell in build.code_cells(build.notebook_of(path))]
        for path in (source, TUTORIALS / source.name)
    )
    assert [code.replace('language.use("zh")', 'language.use("en")') for code in chinese] == english
    assert chinese[0] != english[0]
    assert [c for c in commands_in(TUTORIALS / source.name) if c not in commands_in(source)] == []


@pytest.mark.parametrize("source", [*ENGLISH, *CHINESE], ids=by_name)
def test_no_emphasis_is_broken(source):
    """Stars that Markdown does not take for emphasis stay in the text: `**so：**then` in Chinese is such a trap."""
    rendered = pytest.importorskip("markdown_it").MarkdownIt().enable("table")
    for cell in cells_of(source):
        if cell.cell_type == "markdown":
            inline = [token for token in rendered.parse(cell.source) if token.type == "inline"]
            texts = [child.content for token in inline for child in token.children if child.type == "text"]
            assert [text for text in texts if "*" in text] == []


@pytest.mark.parametrize("path", [*CHINESE, *sorted((TUTORIALS / "zh").glob("*.md"))], ids=by_name)
def test_chinese_pages_use_one_word_for_one_thing(path):
    text = path.read_text(encoding="utf-8")
    for wrong in ("内核", "核函数", "保密", "会计器", "私有训练", "指名拒绝", "线程束", "张量核 "):
        assert wrong not in text, f"{wrong}: see zh/glossary.md"


@pytest.mark.parametrize("source", [*ENGLISH, *CHINESE], ids=by_name)
def test_numbers_in_prose_come_from_committed_results(source, recorded):
    text = prose_of(source)
    unmarked = [match.group(0) for match in QUANTITY.finditer(text)]
    assert unmarked == [], "mark each with <!-- = expression --> (programs/recorded.py), or <!-- given: source -->"
    for shown, expression in CHECKED.findall(text):
        value = eval(expression, {**vars(recorded)})
        digits = len(shown.partition(".")[2])
        assert f"{value:.{digits}f}" == shown.replace(",", ""), f"{source.name}: {shown} is {value} by {expression}"
    assert text.count("<!-- =") == len(CHECKED.findall(text))


@pytest.mark.parametrize("source", [*ENGLISH, *CHINESE], ids=by_name)
def test_claims_in_prose_hold_of_the_recorded_data(source, recorded):
    text = prose_of(source)
    assert text.count("<!-- holds:") == len(CLAIMED.findall(text))
    assert {claim: eval(claim, {**vars(recorded)}) for claim in CLAIMED.findall(text)} == dict.fromkeys(
        CLAIMED.findall(text), True
    )


def test_what_is_said_of_hit_rates_busy_units_and_roofs_is_claimed_where_it_is_said():
    claims = " ".join(CLAIMED.findall(prose_of(TUTORIALS / "03b-read-a-report.py")))
    for what in ("L2 Hit Rate", "L1/TEX Hit Rate", "SM Busy", "No Eligible", "of_roof"):
        assert what in claims


def test_a_false_claim_would_be_found(recorded):
    (claim,) = CLAIMED.findall('hits nothing<!-- holds: metric("addition", "L2 Hit Rate") < 1 -->')
    assert eval(claim, {**vars(recorded)}) is False


def test_a_wrong_number_would_be_found(recorded):
    (pair,) = CHECKED.findall('takes 126.9 ms<!-- = ms("page", "standard") --> a step')
    assert f"{eval(pair[1], vars(recorded)):.1f}" != pair[0]
    assert QUANTITY.search("takes 12 ms a step") and not QUANTITY.search("takes 12 ms<!-- given --> a step")


@pytest.mark.parametrize("command", [c for c in PRINTED if c.startswith("dpscope ")])
def test_a_dpscope_command_has_the_options_it_is_printed_with(command):
    name, *arguments = shlex.split(command)[1:]
    subcommand = main.get_command(None, name)
    assert subcommand is not None, command
    known = {option for parameter in subcommand.params for option in (*parameter.opts, *parameter.secondary_opts)}
    assert [a for a in arguments if a.startswith("--") and a.partition("=")[0] not in {*known, "--help"}] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", [c for c in PRINTED if c not in run_on_a_gpu() and any(word in shlex.split(c) for word in QUICK)]
)
def test_a_quick_dpscope_command_runs_as_printed(command, monkeypatch, tmp_path):
    monkeypatch.chdir(TUTORIALS)
    arguments = shlex.split(command)[1:]
    if arguments[0] == "report":  # it writes beside the results unless told
        arguments += ["--out", str(tmp_path)]
    ran = CliRunner().invoke(main, arguments)
    assert ran.exit_code == 0, ran.output


def test_every_other_command_is_one_that_is_run_on_a_gpu():
    others = [c for c in PRINTED if not c.startswith("dpscope ")]
    assert others and [c for c in others if c.startswith(COMMANDS) and c not in run_on_a_gpu()] == []
    assert [c for c in others if not c.startswith((*COMMANDS, "tensorboard", "pip", "tutorials/programs/"))] == []


def test_the_first_cell_fetches_the_course_outside_a_clone(build, monkeypatch, tmp_path):
    address = "https://example.invalid/someone/dpscope"
    notebook = build.notebook_of(ENGLISH[0], address)
    assert "colab.research.google.com" in notebook.cells[0].source
    first = build.code_cells(notebook)[0].source
    assert f'REPOSITORY = "{address}"' in first
    # git takes this folder for the address; only what is committed is cloned.
    for name, value in {"COUNT": "1", "KEY_0": f"url.file://{ROOT}.insteadOf", "VALUE_0": address}.items():
        monkeypatch.setenv(f"GIT_CONFIG_{name}", value)
    ran = subprocess.run(
        [sys.executable, "-c", first + "\nprint(TUTORIALS)"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    if "not a git repository" in ran.stderr or "does not appear to be a git repository" in ran.stderr:
        pytest.skip("this copy of the project is no clone")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == str(tmp_path / "dpscope-course" / "tutorials")


def test_the_first_cell_says_what_is_missing_outside_a_clone(build, tmp_path):
    first = build.code_cells(build.notebook_of(ENGLISH[0], ""))[0].source
    ran = subprocess.run([sys.executable, "-c", first], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert "address into REPOSITORY" in ran.stderr


def test_numbers_are_written_again_from_the_recordings(build, recorded, tmp_path):
    lesson = tmp_path / "lesson.py"
    lesson.write_text('takes 99.9 ms<!-- = ms("page", "standard") --> and 7 ms<!-- given -->', encoding="utf-8")
    assert build.write_numbers(lesson) == 1
    assert lesson.read_text(encoding="utf-8").startswith(f"takes {recorded.ms('page', 'standard'):.1f} ms<!--")


def test_commands_of_ncu_and_nsys_ended_well_where_they_were_recorded(recorded):
    folder = recorded.folder()
    if folder is None:
        pytest.skip("nothing was recorded on a GPU yet")
    rows = [line.split("\t") for line in (folder / "commands.tsv").read_text(encoding="utf-8").splitlines()[1:]]
    ended = {command: status for status, _, _, command in rows}
    printed = [c for c in PRINTED if c in run_on_a_gpu() and c not in run_on_a_gpu("!")]
    assert {c: ended.get(c) for c in printed if ended.get(c) not in ("0", "started")} == {}
