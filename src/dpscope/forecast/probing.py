"""Probes in processes of their own, so that nothing that one leaves behind is in the next one's figures."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace

from dpscope.errors import UserError
from dpscope.forecast.cards import CARDS
from dpscope.forecast.fitting import Say
from dpscope.forecast.probe import Probe
from dpscope.runner.spec import RunSpec

ANSWER = "probed: "
LONGEST_PROBE = 600.0


def local_card() -> str:
    """Return the name of this machine's GPU in the table of cards."""
    import torch

    if not torch.cuda.is_available():
        raise UserError(
            "--probe measures on a GPU, and there is none here: leave it out for a prediction, or give --gpu"
        )
    properties = torch.cuda.get_device_properties(0)
    gib = properties.total_memory / 2**30
    capability = (properties.major, properties.minor)
    alike = [card for card in CARDS.values() if card.capability == capability and abs(card.memory_gib / gib - 1) < 0.1]
    if not alike:
        raise UserError(
            f"{properties.name} is not in the table of cards: give the nearest one, --gpu {'|'.join(CARDS)}"
        )
    return alike[0].name


def probe_in_processes(spec: RunSpec, batches: Sequence[int], say: Say) -> list[Probe]:
    """Probe a spec at several batches, the smallest first, until one runs out of memory."""
    found: list[Probe] = []
    for batch in batches:
        say(f"{spec.method}: short steps of {batch}")
        answer = _ask(replace(spec, batch_size=batch))
        if isinstance(answer, str):
            if len(found) >= 2:
                break
            raise UserError(f"{spec.method} could not be probed at a batch of {batch}: {answer}")
        found.append(answer)
    return found


def _ask(spec: RunSpec) -> Probe | str:
    """Return a probe, or what kept it from being taken."""
    command = [sys.executable, "-m", "dpscope.forecast.probing", json.dumps(spec.to_dict())]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_PROBE, check=False)
    except subprocess.TimeoutExpired:
        return f"it took more than {LONGEST_PROBE:.0f} s"
    for line in reversed(ended.stdout.splitlines()):
        if line.startswith(ANSWER):
            return Probe(**json.loads(line.removeprefix(ANSWER)))
    lines = [line for line in ended.stderr.splitlines() if line.strip()]
    return lines[-1][:300] if lines else f"it ended with exit code {ended.returncode}"


def _main() -> None:
    from dpscope.forecast.probe import probe

    found = probe(RunSpec.from_dict(json.loads(sys.argv[1])))
    print(ANSWER + json.dumps(asdict(found)), flush=True)


if __name__ == "__main__":
    _main()
