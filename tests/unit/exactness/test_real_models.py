"""Flash clipping is exact on the models that people train, and where Opacus cannot follow, it is said."""

from __future__ import annotations

from functools import cache

import pytest

from dpscope.exactness.check import check
from tests.unit.exactness.real_models import MODELS

pytest.importorskip("transformers")
pytest.importorskip("peft")

# Where Opacus refuses or stumbles: parameters used twice under ghost clipping, ids shared by all samples.
OPACUS_CANNOT = {
    "GPT-2 (tied)": {"flat", "ghost"},
    "BERT with padding": {"flat", "ghost"},
    "a module called twice": {"ghost"},
}
# Neighbours, noise and accounting of Opacus's methods are tried on some models; of flash clipping on all whose layers
# are not those of another one.
OPACUS_AUDITED = ("LoRA on Llama", "a bare parameter", "a module called twice")
AUDITED = [name for name in MODELS if name not in ("Llama", "ViT")]


@cache
def checked(name):
    """Each model is checked once, whatever is asked about it."""
    return check(MODELS[name], ["flash"], name=name, neighbours=name in AUDITED)


@cache
def checked_with_opacus(name):
    return check(MODELS[name], ["flat", "ghost"], name=name, neighbours=name in OPACUS_AUDITED)


@pytest.mark.parametrize("name", MODELS)
def test_flash_is_exact_to_1e_5_in_every_parameter(name):
    found = checked(name)
    (flash,) = found.methods
    assert flash.verdict == "exact", flash.faults
    assert flash.norm_error < 1e-5 and flash.factor_error < 1e-5
    for step in flash.steps:
        assert len(step.parameter_errors) == found.trainable
        assert max(step.parameter_errors.values()) < 1e-5
    assert [step.clipped for step in flash.steps] == [0, 2, 4]
    assert len(flash.paths) == found.trainable  # every one is said to take some path
    assert found.faults == [] and found.ok


@pytest.mark.parametrize("name", MODELS)
def test_opacus_is_exact_wherever_it_runs_and_where_it_does_not_a_sentence_says_so(name):
    by_method = {method.method: method for method in checked_with_opacus(name).methods}
    for method in ("flat", "ghost"):
        cannot = method in OPACUS_CANNOT.get(name, set())
        assert by_method[method].verdict == ("skipped" if cannot else "exact"), by_method[method].faults
        assert not cannot or by_method[method].reason.startswith("Opacus")


@pytest.mark.parametrize("name", AUDITED)
def test_neighbours_noise_and_accounting_raise_no_alarm_wherever_a_method_runs(name):
    audits, expected = checked(name).audits, {"flash"}
    if name in OPACUS_AUDITED:
        audits = audits | checked_with_opacus(name).audits
        expected |= {"flat", "ghost"} - OPACUS_CANNOT.get(name, set())
    assert set(audits) == expected
    for audit in audits.values():
        assert not audit.breached and audit.ok, str(audit)
        assert audit.accounting.verdict == "held" and audit.neighbours.trials >= 25


@pytest.mark.parametrize(
    "name", ["GPT-2 (tied)", "BERT with padding", "ResNet with GroupNorm", "a module called twice"]
)
def test_in_float64_flash_is_exact_to_1e_9(name):
    found = check(MODELS[name], ["flash"], dtype="fp64", neighbours=False)
    assert found.tolerance == 1e-9 and found.ok


def test_a_model_that_computes_in_float32_inside_is_held_to_that():
    found = check(MODELS["Llama"], ["flash"], dtype="fp64", neighbours=False)
    assert found.tolerance == 1e-5 and found.ok
    assert found.warnings[0].startswith("parts of the model compute in float32 whatever they are given")


def test_ties_and_hidden_adapters_are_told():
    assert checked("GPT-2 (tied)").tied == [["transformer.wte.weight", "lm_head.weight"]]
    adapted = checked("LoRA on Llama")
    assert (adapted.trainable, adapted.parameters) == (8, 29)
    hidden = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight and 3 more"
    assert adapted.notes[0].startswith(f"no gradient reaches {hidden}")
