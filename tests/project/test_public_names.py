"""Public names document arguments, results and errors, with an example that runs; docs/api.md has them all."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import inspect
import io
import re
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpscope
from dpscope import flash
from dpscope.flash import layers
from tests import ROOT

PACKAGES = ("dpscope", "dpscope.flash", "dpscope.transformers")
PUBLIC = [f"{home}.{name}" for home in PACKAGES for name in importlib.import_module(home).__all__]
PUBLIC.remove("dpscope.__version__")
PUBLIC += ["dpscope.accelerate.prepare_private", "dpscope.lightning.PrivateTraining"]
# Examples of which a part is compiled and not run: it starts processes or loggers, or needs a GPU or a tokenizer.
COMPILED = {
    "dpscope.lightning.PrivateTraining",
    "dpscope.compare",
    "dpscope.make_sweep",
    "dpscope.find_physical_batch",
    "dpscope.transformers.PrivateSFTTrainer",
}
SLOW = {"dpscope.check", "dpscope.check_loop", "dpscope.plan"}
RAISE_NOTHING = {"dpscope.flash.register_layer"}
# Dataclasses with the fields of another library's class, whose own documentation has them.
BORROWED = {"dpscope.transformers.PrivateTrainingArguments", "dpscope.transformers.PrivateSFTConfig"}
# A name of docs/api.md, and the members that it shows.
SHOWN = {
    name: [each.strip() for each in (members or "").split(",") if each.strip()]
    for name, members in re.findall(
        r"^\.\. auto(?:class|function):: ([\w.]+)(?:\(\))?\n(?:   :members: ?(.*)\n)?",
        (ROOT / "docs" / "api.md").read_text(encoding="utf-8"),
        flags=re.MULTILINE,
    )
}


def find(name: str):
    home, _, short = name.rpartition(".")
    try:
        return getattr(importlib.import_module(home), short)
    except ImportError as error:
        pytest.skip(f"not installed here: {error}")


def documented(text: str, heading: str) -> set[str]:
    """Return the names below a heading of a docstring."""
    section = re.search(rf"^{heading}:\n((?:    .*\n?|\n)+)", text, flags=re.MULTILINE)
    return set(re.findall(r"^    \*{0,2}(\w+):", section[1], flags=re.MULTILINE)) if section else set()


def faults(thing, *, in_prose: bool = False) -> list[str]:
    """Return what the docstring of a class, function or method leaves out, and arguments that there are not.

    With `in_prose` a sentence may name arguments, as `argument`, and begin with "Return".
    """
    text = inspect.getdoc(thing) or ""
    signature = inspect.signature(thing)
    names = set(signature.parameters) - {"self"}
    told = documented(text, "Args")
    if in_prose:
        told |= names & set(re.findall(r"`(\w+)", text))
    found = [f"{name} is not documented" for name in sorted(names - told)]
    if not any(each.kind is each.VAR_KEYWORD for each in signature.parameters.values()):
        found += [f"there is no argument {name}" for name in sorted(told - names)]
    returns = not inspect.isclass(thing) and signature.return_annotation not in ("None", None)
    if returns and "\nReturns:\n" not in text and not (in_prose and re.search(r"\bReturn\b", text)):
        found.append("what is returned is not documented")
    return found


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_documents_all_that_a_caller_needs(name):
    thing = find(name)
    text = inspect.getdoc(thing)
    if name in BORROWED:
        assert documented(text, "Args") == {"kwargs"}
    elif not (inspect.isclass(thing) and issubclass(thing, Exception)):
        assert faults(thing) == []
    assert inspect.isclass(thing) or name in RAISE_NOTHING or "\nRaises:\n" in text
    assert "Example:\n    >>> " in text


def test_the_page_shows_every_public_name():
    assert set(PUBLIC) - set(SHOWN) == set()


@pytest.mark.parametrize("name", [name for name, members in SHOWN.items() if members])
def test_methods_on_the_page_document_their_arguments(name):
    cls = find(name)
    found = {}
    for member in SHOWN[name]:
        thing = getattr(cls, member)
        if isinstance(inspect.getattr_static(cls, member), property):
            text = inspect.getdoc(thing) or ""
            # What stands before a colon would be shown as the property's type.
            found[member] = [] if text and ":" not in text.splitlines()[0] else ["no docstring, or a colon in it"]
        else:
            found[member] = faults(thing, in_prose=True)
    assert {member: each for member, each in found.items() if each} == {}


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("def f(a):\n    '''Return it.'''", ["a is not documented", "what is returned is not documented"]),
        ("def f() -> None:\n    '''Do it.\n\n    Args:\n        a: One.\n    '''", ["there is no argument a"]),
        ("def f(a) -> None:\n    '''Do it.\n\n    Args:\n        a: One.\n    '''", []),
        ("class C:\n    '''It.'''\n    def __init__(self, a): pass", ["a is not documented"]),
    ],
)
def test_what_is_left_out_is_found(code, expected):
    names: dict = {}
    exec(code, names)
    assert faults(names.get("f") or names["C"]) == expected


# -- examples ----------------------------------------------------------------------------------------------------------


class Classifier(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


DATA = TensorDataset(torch.randn(32, 4, generator=torch.Generator().manual_seed(0)), torch.arange(32) % 3)


def make_loop(noise_multiplier: float, max_grad_norm: float, seed: int) -> dpscope.Loop:
    model, engine = Classifier(), flash.PrivacyEngine(accountant="rdp")
    model, optimizer, _ = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e6),
        data_loader=DataLoader(DATA, batch_size=8),
        noise_multiplier=noise_multiplier,
        max_grad_norm=max_grad_norm,
        noise_generator=torch.Generator().manual_seed(seed),
    )

    def step(batch) -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()

    return dpscope.Loop(model=model, step=step, scale=1e6 / 8, accountant=engine.accountant, sample_rate=1 / 4)


def make_workload() -> dpscope.Workload:
    return dpscope.Workload(
        model=Classifier,
        batch=lambda seed, device: torch.randn(8, 4, generator=torch.Generator().manual_seed(seed)),
        loss=lambda model, x: model(x).square().mean(1),
    )


def further_names(name: str, make_names, folder) -> dict:
    """Return names that one example uses: of another example, or of another library."""
    if name == "dpscope.flash.register_layer":
        names = make_names()
        run_example(flash.LayerTap, names)
        return names
    if name.startswith("dpscope.transformers"):
        from transformers import Trainer

        from tests.unit.transformers.small_training import Counting, arguments, collate, small_llama

        args = arguments(folder, max_steps=1)
        data = [{key: value[0] for key, value in collate([Counting()[0]]).items()}] * 8
        return {"Trainer": Trainer, "model": small_llama(), "args": args, "data": data}
    return {}


@pytest.fixture
def make_names(tmp_path, monkeypatch, make_result):
    """Return new values of the names that docs/api.md says the examples use."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(layers, "_FAMILIES", dict(layers._FAMILIES))
    for method in ("standard", "flash"):
        (tmp_path / f"{method}.json").write_text(make_result(method=method).to_json())

    def make() -> dict:
        torch.manual_seed(0)
        model, loader = Classifier(), DataLoader(DATA, batch_size=8)
        x, y = next(iter(loader))
        return {
            "torch": torch,
            "dpscope": dpscope,
            **{name: getattr(flash, name) for name in flash.__all__},
            "model": model,
            "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
            "loader": loader,
            "x": x,
            "y": y,
            "loss_fn": nn.CrossEntropyLoss(),
            "folder": str(tmp_path),
            "make_loop": make_loop,
            "workload": make_workload(),
        }

    return make


def run_example(thing, names: dict, *, compiled: bool = False) -> None:
    """Run the example of a docstring; compare what it prints if the docstring says that."""
    for example in doctest.DocTestParser().get_examples(inspect.getdoc(thing) or ""):
        code = compile(example.source, "<example>", "single")
        if example.options.get(doctest.SKIP):
            assert compiled, "an example is left out that could run"
            continue
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()) as printed:
            warnings.simplefilter("ignore")
            exec(code, names)
        if example.want:
            assert doctest.OutputChecker().check_output(example.want, printed.getvalue(), doctest.ELLIPSIS)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in PUBLIC])
def test_the_example_of_a_public_name_runs(name, make_names, tmp_path):
    thing = find(name)
    run_example(thing, make_names() | further_names(name, make_names, tmp_path), compiled=name in COMPILED)


@pytest.mark.parametrize("name", [name for name, members in SHOWN.items() if members])
def test_the_examples_of_its_methods_run(name, make_names):
    for member in SHOWN[name]:
        run_example(getattr(find(name), member), make_names())
