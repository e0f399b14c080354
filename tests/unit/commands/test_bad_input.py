"""A mistake at the keyboard gets a sentence and exit code 2, never a traceback."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from dpscope.cli import main


@pytest.fixture
def refused(tmp_path, monkeypatch):
    """Run a command that has to be refused; the sentence it gives, on one line."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        outcome = CliRunner().invoke(main, [str(argument) for argument in arguments])
        assert isinstance(outcome.exception, SystemExit), f"not refused but: {outcome.exception!r}"
        assert outcome.exit_code == 2, outcome.output
        assert "Traceback" not in outcome.output
        assert outcome.stdout == ""
        return " ".join(outcome.stderr.split())

    return run


BAD_OPTIONS = [
    ("--methods magic", "unknown method 'magic': choose from standard, flat, ghost"),
    ("--methods standard,,ghost", "has an empty part"),
    ("--model huge", "unknown model 'huge': choose one of tiny, small, 1b, cnn"),
    ("--model tinny", "unknown model 'tinny' (did you mean tiny?)"),
    ("--model lama", "did you mean hf:llama?"),
    ("--hf-config meta-llama/Llama-3", "Names of models on the hub are never fetched: save its config.json"),
    ("--fail-if flash>1", "is no condition: write METHOD.FIGURE > NUMBER"),
    ("--dtype fp8", "unknown dtype 'fp8': choose one of fp32, tf32, bf16"),
    ("--dtype tf32", "tf32 is a CUDA number format"),
    ("--optimizer lion", "unknown optimizer 'lion'"),
    ("--device tpu", "unknown device 'tpu': choose one of auto, cpu, cuda"),
    ("--batch-size 0", "batch size must be a whole number of at least 1, not 0"),
    ("--batch-size -4", "batch size must be a whole number of at least 1, not -4"),
    ("--batch-size eight", "'eight' is not a list of whole numbers"),
    ("--batch-size 2.5", "'2.5' is not a list of whole numbers"),
    ("--batch-size 8,,16", "has an empty part"),
    ("--batch-size 4,0", "batch size must be a whole number of at least 1, not 0"),
    ("--seq-len 0", "sequence length must be a whole number of at least 1, not 0"),
    ("--seq-len -64", "sequence length must be a whole number of at least 1, not -64"),
    ("--seq-len long", "'long' is not a list of whole numbers"),
    ("--seq-len 64,1024", "sequence length 1024 is longer than the 512 positions of model 'tiny'"),
    ("--hidden-dim 130", "hidden size 130 is not divisible by 4 attention heads"),
    ("--num-heads 0", "num heads must be a whole number of at least 1"),
    ("--num-layers 1000000000", "num layers must be a whole number of at most 4096, not 1000000000"),
    ("--model hf:gpt2-tiny --num-layers 5000", "num layers must be a whole number of at most 4096, not 5000"),
    ("--model hf:vit-tiny --num-classes 99999999", "num classes must be a whole number of at most 1000000"),
    ("--num-layers many", "'many' is not a valid integer"),
    ("--vocab-size -1", "vocab size must be a whole number of at least 1"),
    ("--attention flash", "'flash' is not one of 'sdpa', 'opacus'"),
    ("--norm group", "model 'tiny' has no --norm"),
    ("--model cnn --seq-len 64", "takes images and has no sequence length: leave out --seq-len"),
    ("--model cnn --image-size 2", "image size must be at least 4"),
    ("--warmup -1", "warm-up steps must be a whole number of at least 0"),
    ("--steps 0", "steps must be a whole number of at least 1"),
    ("--seed -1", "seed must be a whole number of at least 0"),
    ("--learning-rate nan", "learning rate must be a number above 0"),
    ("--noise-multiplier -1", "noise multiplier must be zero or more"),
    ("--max-grad-norm 0", "max grad norm must be a number above 0"),
    ("--timeout 0", "'--timeout': 0.0 is not in the range x>0"),
    ("--timeout nan", "--timeout must be a number above 0"),
    ("--memory-limit 0", "'--memory-limit': 0.0 is not in the range x>0"),
    ("--memory-limit -2", "'--memory-limit': -2.0 is not in the range x>0"),
    ("--memory-limit nan", "--memory-limit must be a number above 0"),
    ("--memory-limit inf", "--memory-limit must be a number above 0"),
    ("--seed 99999999999999999999", "seed must be a whole number of at most 9223372036854775807"),
    ("--resume", "--resume needs --out DIR"),
    ("--resume --overwrite --out somewhere", "give one of the two"),
    ("--no-such-option", "No such option"),
]


@pytest.mark.parametrize(("options", "sentence"), BAD_OPTIONS, ids=[options for options, _ in BAD_OPTIONS])
def test_compare_refuses_with_a_sentence(refused, tmp_path, options, sentence):
    said = refused("compare", "--device", "cpu", "--methods", "standard", *options.split())
    assert sentence in said
    assert list(tmp_path.iterdir()) == []  # and nothing was begun


def test_cuda_without_cuda_is_refused_with_where_to_look(refused):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    said = refused("compare", "--device", "cuda")
    assert "torch sees no CUDA device here: run `dpscope doctor`, or use --device cpu" in said


@pytest.mark.parametrize("method", ["flat", "ghost"])
def test_batch_norm_under_a_private_method_names_the_layers_and_their_replacement(refused, method):
    said = refused("compare", "--device", "cpu", "--model", "cnn", "--norm", "batch", "--methods", f"standard,{method}")
    assert "cannot be trained privately" in said
    assert "1 is BatchNorm2d, use nn.GroupNorm(32, 64)" in said
    assert "5 is BatchNorm2d, use nn.GroupNorm(32, 128)" in said


def test_an_output_folder_under_a_file_is_refused(refused, tmp_path):
    (tmp_path / "file").write_text("mine")
    command = ("compare", "--device", "cpu", "--methods", "standard", "--out")
    assert "cannot write to" in refused(*command, tmp_path / "file" / "sub")
    assert "is a file, not a folder: choose another --out" in refused(*command, tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_an_output_folder_with_results_is_refused_without_resume(refused, tmp_path, make_result):
    results = tmp_path / "out" / "results"
    results.mkdir(parents=True)
    (results / "row.json").write_text(make_result().to_json())
    said = refused("compare", "--device", "cpu", "--methods", "standard", "--out", tmp_path / "out")
    assert "already holds results: add --resume to finish that sweep" in said
    assert [path.name for path in results.iterdir()] == ["row.json"]


def test_report_refuses_what_is_not_a_folder_of_results(refused, tmp_path):
    assert "is not a folder: give the --out folder" in refused("report", tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "no dpscope results in" in refused("report", tmp_path / "empty")
    (tmp_path / "empty" / "cut.json").write_text('{"schema_')
    assert "cut.json: not complete JSON" in refused("report", tmp_path / "empty")


def test_an_unknown_command_is_refused(refused):
    assert "No such command 'compaer'" in refused("compaer")


def test_all_instruments_and_some_of_them_are_not_asked_for_at_once():
    result = CliRunner().invoke(main, ["compare", "--all", "--instruments", "time"])
    assert result.exit_code != 0
    assert "--all is every instrument" in f"{result.output}{result.exception}"


def test_help_names_every_instrument_and_the_short_way_to_all():
    said = " ".join(CliRunner().invoke(main, ["compare", "--help"]).output.split())
    assert "time, memory, ncu, nsys, trace, or all" in said
    assert "dpscope compare --all" in said
