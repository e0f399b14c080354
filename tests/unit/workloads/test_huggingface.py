"""Architectures of Hugging Face: their published sizes, any other size, what a batch holds, and what is refused."""

from __future__ import annotations

import json
import os
import sys

import pytest
import torch

from dpscope.errors import UserError
from dpscope.runner.spec import RunSpec
from dpscope.workloads.configs import PRESETS, config_from_file, make_config
from dpscope.workloads.workload import build_workload
from tests import rows_here

transformers = pytest.importorskip("transformers")

CPU = torch.device("cpu")
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "torch_dtype": "bfloat16",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
    "max_position_embeddings": 64,
}


@pytest.fixture
def config_file(tmp_path):
    def write(data):
        path = tmp_path / "config.json"
        path.write_text(data if isinstance(data, str) else json.dumps(data))
        return path

    return write


def build(config, batch_size=3, seq_len=None):
    return build_workload(config, batch_size=batch_size, seq_len=seq_len)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"num_local_experts": 10**9}, "num_local_experts"),
        ({"decoder_layers": 5000}, "decoder_layers"),
        ({"depths": [2, 10**8]}, "depths"),
        ({"text_config": {"num_blocks": 10**7}}, "num_blocks"),
    ],
)
def test_more_modules_than_can_be_built_are_refused_whatever_a_file_calls_them(config_file, settings, named):
    with pytest.raises(UserError, match=f"{named} must be a whole number of at most 4096, not "):
        config_from_file(config_file({**LLAMA, **settings}))


# Parameters as counted by their authors' releases: GPT-2 small, Llama 3.2 1B, BERT base and ViT-B/16 with their heads.
@pytest.mark.parametrize(
    ("model", "parameters"),
    [("hf:gpt2", 124_439_808), ("hf:llama", 1_235_814_400), ("hf:bert", 109_483_778), ("hf:vit", 86_567_656)],
)
def test_a_preset_is_the_published_model(model, parameters):
    with torch.device("meta"):
        built = build(make_config(model)).model()
    assert sum(p.numel() for p in built.parameters()) == parameters
    assert built.config._attn_implementation == "sdpa"
    assert built.training


@pytest.mark.parametrize("model", [name for name in PRESETS if name.startswith("hf:") and name.endswith("-tiny")])
def test_weights_are_random_float32_and_nothing_is_dropped_out(model):
    workload = build(make_config(model), seq_len=None if "vit" in model else 16)
    torch.manual_seed(0)
    built, batch = workload.model(), workload.batch(0, CPU)
    assert {p.dtype for p in built.parameters()} == {torch.float32}
    assert sum(p.numel() for p in built.parameters()) < 1e6
    losses = workload.loss(built, batch)
    assert losses.shape == (3,)
    assert torch.equal(losses, workload.loss(built, batch))  # in training mode, twice the same
    assert os.environ["HF_HUB_OFFLINE"] == "1"


def test_a_sequences_loss_is_the_mean_over_its_next_tokens():
    workload = build(make_config("hf:gpt2-tiny"), seq_len=16)
    torch.manual_seed(0)
    model, batch = workload.model(), workload.batch(0, CPU)
    tokens = torch.cat([batch["input_ids"], batch["labels"][:, -1:]], dim=1)
    for losses, sample in zip(workload.loss(model, batch), tokens, strict=True):
        alone = model(input_ids=sample[None, :-1]).logits.log_softmax(-1)[0]
        wanted = -alone[torch.arange(16), sample[1:]].mean()
        torch.testing.assert_close(losses, wanted, rtol=1e-5, atol=1e-5)


def test_sequences_for_classification_differ_in_length_and_padding_changes_nothing():
    workload = build(make_config("hf:bert-tiny"), batch_size=8, seq_len=16)
    torch.manual_seed(0)
    model, batch = workload.model(), workload.batch(0, CPU)
    lengths = batch["attention_mask"].sum(1)
    assert len(set(lengths.tolist())) > 2
    assert 8 <= int(lengths.min()) < int(lengths.max()) <= 16
    padded = batch["attention_mask"] == 0
    assert (batch["input_ids"][padded] == model.config.pad_token_id).all()
    assert (batch["input_ids"][~padded] != model.config.pad_token_id).all()
    other = {**batch, "input_ids": torch.where(padded, 7, batch["input_ids"])}
    torch.testing.assert_close(workload.loss(model, batch), workload.loss(model, other))


@pytest.mark.parametrize("model", ["hf:gpt2-tiny", "hf:llama-tiny", "hf:bert-tiny"])
def test_every_input_has_a_contiguous_row_for_each_sample(model):
    batch = build(make_config(model), seq_len=16).batch(0, CPU)
    assert {"input_ids", "attention_mask", "position_ids", "labels"} <= set(batch)
    for value in batch.values():
        assert value.shape[0] == 3
        assert value.is_contiguous()


def test_a_seed_means_the_same_batch_every_time_and_another_seed_another():
    workload = build(make_config("hf:vit-tiny"))
    first, again, other = (workload.batch(seed, CPU)["pixel_values"] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_flags_change_what_each_configuration_calls_them():
    gpt2 = make_config("hf:gpt2", hidden_dim=96, num_layers=3, num_heads=6, max_seq_len=64, vocab_size=99)
    assert dict(gpt2.settings) == {
        "vocab_size": 99,
        "n_embd": 96,
        "n_inner": 384,  # in proportion to the hidden size
        "n_layer": 3,
        "n_head": 6,
        "n_positions": 64,
    }
    llama = make_config("hf:llama", hidden_dim=64, intermediate_dim=100, num_heads=4, kv_heads=2)
    assert (llama.settings["hidden_size"], llama.settings["intermediate_size"]) == (64, 100)
    vit = make_config("hf:vit", image_size=32, patch_size=8, num_classes=5)
    assert (vit.settings["image_size"], vit.settings["patch_size"], vit.settings["num_labels"]) == (32, 8, 5)


def test_any_architecture_can_be_described_by_its_file(config_file):
    config = config_from_file(config_file(LLAMA))
    model = build(config, seq_len=8).model()
    assert type(model) is transformers.LlamaForCausalLM
    assert {p.dtype for p in model.parameters()} == {torch.float32}  # --dtype decides, not the file
    assert config.name == "hf:llama"
    assert config.resized(hidden_dim=16, vocab_size=7).settings["vocab_size"] == 7
    spec = RunSpec(workload=config, method="flat", batch_size=2)
    assert spec.seq_len == 64
    again = RunSpec.from_dict(json.loads(json.dumps(spec.to_dict())))
    assert (again, hash(again), again.digest) == (spec, hash(spec), spec.digest)


def test_a_file_with_labels_has_as_many_classes(config_file):
    labels = {"id2label": {"0": "a", "1": "b", "2": "c"}, "label2id": {"a": 0, "b": 1, "c": 2}}
    bert = {"model_type": "bert", "architectures": ["BertForSequenceClassification"], "hidden_size": 32, **labels}
    config = config_from_file(config_file({**bert, "num_hidden_layers": 1, "num_attention_heads": 2}))
    assert build(config, seq_len=8).model().config.num_labels == 3


def test_a_decoder_can_classify_sequences(config_file):
    config = config_from_file(config_file({**LLAMA, "architectures": ["LlamaForSequenceClassification"]}))
    workload = build(config, seq_len=8)
    assert workload.loss(workload.model(), workload.batch(0, CPU)).shape == (3,)


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ("{", "not JSON"),
        ("[]", 'not the configuration of a model, for it has no "model_type"'),
        ({"hidden_size": 32}, 'not the configuration of a model, for it has no "model_type"'),
        ({"model_type": "llama"}, r"which model of type 'llama'\? Add \"architectures\": \[NAME\]"),
        ({**LLAMA, "architectures": []}, r"which model of type 'llama'\?"),
        (
            {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]},
            "dpscope has no loss for the architecture 'T5ForConditionalGeneration': .*--workload",
        ),
        (
            {"model_type": "wav2vec2", "architectures": ["Wav2Vec2ForCTC"]},
            "dpscope has no loss for the architecture 'Wav2Vec2ForCTC'",
        ),
        ({**LLAMA, "num_attention_heads": 5}, "hidden size 32 is not divisible by 5 attention heads"),
        ({**LLAMA, "num_key_value_heads": 3}, "4 attention heads are not divisible by 3 key-value heads"),
        ({**LLAMA, "num_hidden_layers": 0}, "num layers must be a whole number of at least 1, not 0"),
    ],
)
def test_a_file_that_is_no_models_is_refused_with_a_sentence(config_file, data, sentence):
    with pytest.raises(UserError, match=sentence):
        config_from_file(config_file(data))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"model_type": "nosuch"}, "knows no model of type 'nosuch'"),
        ({"architectures": ["NoSuchForCausalLM"]}, "has no architecture 'NoSuchForCausalLM'"),
        ({"rms_norm_eps": "small"}, "transformers (refuses the configuration of 'hf:llama'|cannot build)"),
    ],
)
def test_a_file_that_transformers_does_not_know_is_refused_with_a_sentence(config_file, change, sentence):
    with pytest.raises(UserError, match=sentence):
        build(config_from_file(config_file({**LLAMA, **change})), seq_len=8).model()


def test_a_file_that_is_not_there_is_refused_with_a_sentence(tmp_path):
    with pytest.raises(UserError, match=r"--hf-config .*none.json: No such file"):
        config_from_file(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("model", "sizes", "sentence"),
    [
        ("hf:nope", {}, "unknown model 'hf:nope': choose one of .*hf:gpt2, hf:llama.*or any other architecture with"),
        ("hf:gpt2", {"kv_heads": 2}, "model 'hf:gpt2' has no --kv-heads"),
        ("hf:gpt2", {"image_size": 2}, "model 'hf:gpt2' has no --image-size"),
        ("hf:vit", {"norm": "group"}, "model 'hf:vit' has no --norm"),
        ("hf:bert", {"num_heads": 7}, "hidden size 768 is not divisible by 7 attention heads"),
        ("hf:llama", {"num_heads": 4}, "4 attention heads are not divisible by 8 key-value heads: change --num-heads"),
    ],
)
def test_a_size_that_cannot_be_is_refused_with_a_sentence(model, sizes, sentence):
    with pytest.raises(UserError, match=sentence):
        make_config(model, **sizes)


def test_lengths_are_held_to_the_models_positions_and_images_have_none():
    with pytest.raises(UserError, match="sequence length 129 is longer than the 128 positions of model 'hf:bert-tiny'"):
        RunSpec(workload=make_config("hf:bert-tiny"), method="flat", batch_size=1, seq_len=129)
    with pytest.raises(UserError, match="'hf:vit' takes images and has no sequence length"):
        RunSpec(workload=make_config("hf:vit"), method="flat", batch_size=1, seq_len=8)


def test_without_transformers_what_to_install_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UserError, match=r"'hf:gpt2' needs Hugging Face's transformers: .*pip install transformers$"):
        build(make_config("hf:gpt2"), seq_len=8)


def test_without_transformers_no_row_is_begun(monkeypatch, tmp_path):
    from click.testing import CliRunner

    from dpscope.cli import main

    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.chdir(tmp_path)
    outcome = CliRunner().invoke(main, ["compare", "--device", "cpu", "--model", "hf:bert", "--methods", "standard"])
    assert outcome.exit_code == 2
    assert "pip install transformers" in outcome.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_row_that_opacus_refuses_says_so_and_the_sweep_goes_on(tmp_path):
    """Ghost clipping refuses GPT-2's tied embedding; the command ends with 1 and the table is complete."""
    command = ["compare", "--device", "cpu", "--model", "hf:gpt2-tiny", "--num-layers", "1"]
    command += ["--methods", "ghost,standard", "--batch-size", "2", "--seq-len", "8", "--warmup", "0", "--steps", "1"]
    done = rows_here.run(*command, "--instruments", "time", "--out", tmp_path / "out")
    assert done.exit_code == 1, done.output
    rows = {
        line.split()[0]: line.split()[-1] for line in done.stdout.splitlines() if line.startswith(("ghost ", "sta"))
    }
    assert rows == {"standard": "ok", "ghost": "skipped"}
    sentence = "ghost at batch 2, sequence 8: Opacus refuses this model: Parameter tying is not supported with Ghost"
    assert sentence in " ".join(done.stdout.split())
    assert "Traceback" not in done.stdout
