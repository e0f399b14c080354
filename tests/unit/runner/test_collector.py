"""The garbage collector rests while a measuring process imports, and works in every step."""

from __future__ import annotations

import gc

from dpscope.instruments.peaks import live_tensor_bytes
from dpscope.runner import worker
from dpscope.runner.steps import assemble
from tests.forked import run_forked


def test_it_works_again_before_there_is_a_model_whose_tensors_it_therefore_knows(make_spec):
    def measure() -> None:
        gc.unfreeze()
        worker.rest_collector()
        assert not gc.isenabled()
        trainer, _ = assemble(make_spec(method="flash"))
        assert gc.isenabled()
        assert gc.get_freeze_count() > 100_000
        assert live_tensor_bytes() >= sum(p.nbytes for p in trainer.model.parameters())

    done = run_forked(measure)
    assert done.returncode == 0, done.stderr


def test_where_it_does_not_rest_nothing_is_frozen(make_spec):
    before = gc.get_freeze_count()
    assemble(make_spec())
    assert gc.isenabled()
    assert gc.get_freeze_count() <= before
