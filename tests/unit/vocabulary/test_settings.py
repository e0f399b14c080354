"""A new setting is one field: commands, Python, result files and reports learn of it from there."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from dpscope.runner.spec import RunSpec
from dpscope.vocabulary.settings import FIRST_SETTINGS, SETTINGS
from dpscope.workloads.configs import make_config
from tests.unit.vocabulary import with_more_settings


@pytest.fixture(scope="module")
def seen():
    """What a dpscope with two more settings says of them."""
    command = [sys.executable, with_more_settings.__file__]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_rows_measured_before_the_setting_existed_keep_their_digest(seen):
    usual = RunSpec(workload=make_config("tiny"), method="standard", batch_size=2)
    assert seen["usual"] == [usual.digest, usual.file_name, usual.to_dict()]
    assert seen["kept"] == [True, False, True]


def test_a_row_with_the_setting_is_another_row_and_says_so(seen):
    digest, file_name, label, spec = seen["other"]
    assert digest != seen["usual"][0]
    assert label == "standard tiny bs2 seq256 fp32 lookahead=4 freeze-norms"
    assert file_name.startswith("standard_tiny_bs2_seq256_fp32_lookahead-4_freeze-norms-time-")
    assert (spec["lookahead"], spec["freeze_norms"]) == (4, True)
    assert seen["again"]
    assert seen["told to trainers"] == [4, 1]


def test_a_value_that_means_nothing_is_refused_in_a_sentence(seen):
    assert seen["refusals"] == [
        "lookahead must be a whole number of at least 1, not 0",
        "freeze norms must be True or False, not 1",
    ]
    assert "spec" in seen["damage"]


def test_every_measuring_command_has_its_flag_and_python_its_argument(seen):
    words = " ".join(seen["help"].split())
    assert "--lookahead INTEGER Micro-batches. [default: 1]" in words
    assert "--freeze-norms No training of norms." in words
    assert seen["planned by command"] == seen["planned in Python"]
    assert [(spec["lookahead"], spec["freeze_norms"]) for spec in seen["planned by command"]] == [(4, True)]


def test_commands_that_measure_what_is_missing_give_it(seen):
    usual, other = seen["commands"]
    assert "lookahead" not in usual and "freeze" not in usual
    assert " --lookahead 4 --freeze-norms " in other


def test_reports_keep_such_rows_apart_and_tell_them_apart(seen):
    assert seen["ratios"] == [1.0, 3.0, 1.0, 4.0]  # each next to standard with the same settings
    assert seen["labels"] == ["lookahead 1, no freeze norms", "lookahead 4, freeze norms"]
    columns = next(line for line in seen["summary"].splitlines() if line.startswith("method"))
    assert columns.split()[:6] == ["method", "batch", "seq", "lookahead", "freeze", "norms"]
    assert "max grad norm 1, lookahead 4, freeze norms; 3 warm-up" in " ".join(seen["summary"].split())
    assert seen["frame"]["lookahead"] == [1, 1, 4, 4]
    assert seen["frame"]["freeze_norms"] == [False, False, True, True]
    assert r"lookahead & freeze\_norms" in seen["latex"]
    assert "Micro-batches" in seen["page"]
    assert [spec.get("lookahead") for spec in seen["in both sweeps"]] == [None, None]


def test_every_setting_of_the_first_result_files_is_still_one():
    assert set(FIRST_SETTINGS) <= set(SETTINGS)
    assert [name for name, setting in SETTINGS.items() if setting.default is True] == []
