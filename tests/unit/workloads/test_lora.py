"""Adapters: how they are asked for, and that they alone are trained."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from dpscope.errors import UserError
from dpscope.runner.spec import RunSpec
from dpscope.runner.steps import make_trainer
from dpscope.workloads.configs import (
    LoraSettings,
    config_from_dict,
    config_to_dict,
    make_config,
    parse_lora,
    with_lora,
)
from dpscope.workloads.workload import build_workload

TINY = make_config("tiny", num_layers=1, hidden_dim=16, num_heads=2, vocab_size=50)


def adapted(text, config=TINY):
    return with_lora(config, parse_lora(text))


def build(config):
    return build_workload(config, batch_size=2, seq_len=8).model()


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("r=8,target=q_proj", LoraSettings(r=8, alpha=16, target=("q_proj",))),
        ("r=8,alpha=4,target=q_proj,v_proj", LoraSettings(r=8, alpha=4, target=("q_proj", "v_proj"))),
        ("target=q_proj,v_proj, r = 4", LoraSettings(r=4, alpha=8, target=("q_proj", "v_proj"))),
    ],
)
def test_settings_are_read(text, settings):
    assert parse_lora(text) == settings


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "write r=8,alpha=16,target=q_proj,v_proj"),
        ("8", "'8' has no name: write r=8"),
        ("r=8", "needs r and target"),
        ("target=q_proj", "needs r and target"),
        ("r=eight,target=q", "--lora r must be a whole number of at least 1, not 'eight'"),
        ("r=0,target=q", "--lora r must be a whole number of at least 1, not 0"),
        ("r=8,alpha=-1,target=q", "--lora alpha must be a whole number of at least 1, not -1"),
        ("r=8,rank=8,target=q", "'rank' is not one of r, alpha, target"),
        ("r=8,r=4,target=q", "'r' is not one of r, alpha, target, each once"),
        ("r=8,target=", "--lora needs the modules to adapt"),
        ("r=8,target=q,,v", "--lora needs the modules to adapt"),
    ],
)
def test_settings_that_say_nothing_are_refused_with_a_sentence(text, sentence):
    with pytest.raises(UserError, match=sentence):
        parse_lora(text)


def test_a_spec_with_adapters_comes_back_the_same_from_json_and_is_another_one_than_without():
    spec = RunSpec(workload=adapted("r=2,target=query,up"), method="flash", batch_size=2, seq_len=8)
    described = json.loads(json.dumps(spec.to_dict()))
    assert described == spec.to_dict()  # what --resume compares
    again = RunSpec.from_dict(described)
    assert (again, again.digest) == (spec, spec.digest)
    assert spec.workload.name == "tiny+lora-r2"
    plain = RunSpec(workload=TINY, method="flash", batch_size=2, seq_len=8)
    assert "lora" not in plain.to_dict()["workload"]
    assert plain.digest != spec.digest


def test_a_config_without_adapters_reads_as_before():
    assert config_from_dict(config_to_dict(TINY)) == TINY


def test_only_adapters_are_trained_and_every_one_of_them_moves():
    config = adapted("r=2,target=query,up")
    trainer, batch = make_trainer(RunSpec(workload=config, method="standard", batch_size=2, seq_len=8))
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train_step(batch)
    moved = {name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name in before if "lora_" in name}
    assert len(moved) == 4  # A and B of two layers


def test_a_target_that_matches_nothing_names_modules_that_exist():
    with pytest.raises(UserError, match=r"--lora target=q_proj: the model has no such module; it has tokens, .*query"):
        build(adapted("r=2,target=q_proj"))


def test_a_target_that_cannot_be_adapted_is_refused_with_a_sentence():
    with pytest.raises(UserError, match="--lora: peft refuses this model: Target module LayerNorm"):
        build(adapted("r=2,target=norm"))


def test_without_peft_what_to_install_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UserError, match=r"--lora needs Hugging Face's peft: .*pip install peft$"):
        build(adapted("r=2,target=query"))
