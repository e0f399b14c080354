"""Every example runs as a script, from any folder, offline, and its own assertions hold."""

from __future__ import annotations

import runpy
import socket

import pytest

from tests import ROOT

EXAMPLES = ROOT / "examples"
# Each script and what its last lines have to say.
SAYS = {
    "ordinary_loop.py": ["accuracy 0.", "-differentially private"],
    "gradient_accumulation.py": [
        "physical_batches: the same weights as one batch of 64",
        "backward_passes: the same weights as one batch of 64",
        "8 private steps in batches of at most 8: ε = ",
    ],
    "lora.py": ["4 adapter matrices trained, 12 weights left as they were", "ε = "],
    "check_opacus_loop.py": ["the loop: neighbours, noise, accounting held."],
    "check_own_loop.py": ["the loop: neighbours, noise, accounting held.", "the loop: BREACH (neighbours)."],
    "fsdp.py": ["48 steps on 1 ranks", "-differentially private"],
    "huggingface_trainer.py": ["in 32 private steps", "resumed at step 16: the same weights, and ε = 3.00"],
    "digits.py": ["ordinary training", "flash clipping, ε = 8"],
    "trl_sft.py": ["14 adapter matrices trained", "ε = 3.00"],
    "accelerate_loop.py": ["saved at ε = 5.28, resumed to ε = 5.80"],
    "lightning_module.py": ["saved at ε = 5.28, resumed to ε = 6.28"],
}
NEEDS = {
    "lora.py": ["peft"],
    "huggingface_trainer.py": ["peft", "accelerate"],
    "digits.py": ["sklearn"],
    "trl_sft.py": ["trl", "datasets"],
    "accelerate_loop.py": ["accelerate"],
    "lightning_module.py": ["lightning"],
}


def test_no_example_is_left_untried():
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(SAYS)


@pytest.mark.parametrize("name", SAYS)
def test_an_example_runs_and_its_assertions_hold(name, tmp_path, monkeypatch, capsys):
    for package in NEEDS.get(name, ()):
        pytest.importorskip(package)

    def refuse(*args, **kwargs):
        raise AssertionError("an example asked for the network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setenv("SEEDS", "2")  # of digits.py
    monkeypatch.setattr("sys.argv", [name])
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    printed = capsys.readouterr().out
    for sentence in SAYS[name]:
        assert sentence in printed
    assert list(tmp_path.iterdir()) == []
