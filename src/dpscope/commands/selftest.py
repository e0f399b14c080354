"""`dpscope selftest`: tests if every trainer works here."""

from __future__ import annotations

from collections.abc import Callable

import click

from dpscope.endings import leave
from dpscope.packages import explain_import_error, require


@click.command(name="selftest")
def command() -> None:
    """Take one CPU step of every trainer on a model of about 1M parameters, and say what passed."""
    leave(run_local_test())


def run_local_test(say: Callable[[str], object] = click.echo) -> bool:
    """Take one step with every method; return True if all passed."""
    require("torch")
    from dpscope.vocabulary.methods import methods

    passed = True
    for method in methods().values():
        try:
            name, loss = _one_step(method.name)
        except Exception as error:
            passed = False
            sentence = explain_import_error(error) if isinstance(error, ImportError) else None
            say(f"[TEST FAILED] {method.name}: {sentence or f'{type(error).__name__}: {error}'}")
        else:
            say(f"[TEST OK] {name} passed local test. (loss {loss:.4f})")
    return passed


def _one_step(method: str) -> tuple[str, float]:
    import math

    from dpscope.runner.spec import RunSpec
    from dpscope.runner.steps import make_trainer
    from dpscope.workloads.configs import make_config

    trainer, batch = make_trainer(
        RunSpec(workload=make_config("tiny"), method=method, batch_size=2, seq_len=64, device="cpu")
    )
    before = [p.detach().clone() for p in trainer.model.parameters()]
    loss = trainer.train_step(batch).item()
    if not math.isfinite(loss):
        raise RuntimeError(f"the loss is {loss}")
    moved = (not bool((a == b).all()) for a, b in zip(before, trainer.model.parameters(), strict=True))
    if not all(moved):
        raise RuntimeError("some parameters did not move")
    return type(trainer).__name__, loss
