"""Other engines as methods: each exact on the decoder, or refused with what to install."""

from __future__ import annotations

import pytest

from dpscope.errors import UserError
from dpscope.exactness.check import check
from dpscope.vocabulary import methods
from dpscope.workloads.configs import make_config
from dpscope.workloads.workload import build_workload


@pytest.mark.parametrize("method", [pytest.param("functorch"), "opake", "fastdp"])
def test_a_rival_is_exact_on_a_small_decoder(method):
    rival = next(each for each in methods.RIVALS if each.name == method)
    if rival.package:
        pytest.importorskip(rival.package)
    config = make_config("tiny", num_layers=1, hidden_dim=16, num_heads=2, vocab_size=32)
    found = check(build_workload(config, batch_size=3, seq_len=8), [method], neighbours=False, device="cpu")
    assert found.ok, str(found)


def test_a_rival_that_is_not_installed_says_what_to_install(monkeypatch):
    monkeypatch.setattr("dpscope.packages._is_there", lambda package: package == "pip")
    with pytest.raises(UserError, match="not installed in this Python: opake"):
        methods.resolve_method("opake")


def test_rivals_are_measured_only_where_they_are_asked_for():
    assert not {each.name for each in methods.RIVALS} & set(methods.methods())
