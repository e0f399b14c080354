"""privacy.json in a Trainer's checkpoint: the spent privacy, and the state a resumed run needs.

It holds the seed of the draws: anyone who has it knows who took part in which step, and the privacy of sampling is
lost. Keep checkpoints; publish the model that `save_model` writes, which has no such file.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dpscope.errors import UserError

PRIVACY_FILE = "privacy.json"
NOISE_FILE = "noise.pt"  # of sharded models: where the noise of a given seed stands, and which keys were used
VERSION = 1


@dataclass(frozen=True)
class PrivacyRecord:
    """Spent privacy and state of the draws; `history`: (noise multiplier, sample rate, steps) of the accountant."""

    history: list[tuple[float, float, int]]
    mechanism: str
    noise_multiplier: float
    sample_rate: float
    draw_seed: int

    def save(self, folder: Path) -> None:
        text = json.dumps({"version": VERSION, **asdict(self)}, indent=2)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / PRIVACY_FILE).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> PrivacyRecord:
        """Raise UserError if the checkpoint does not say what privacy its run has spent."""
        try:
            saved: dict[str, Any] = json.loads((folder / PRIVACY_FILE).read_text(encoding="utf-8"))
            version = saved.pop("version")
            saved["history"] = [(float(sigma), float(rate), int(steps)) for sigma, rate, steps in saved["history"]]
            record = cls(**saved)
        except (OSError, ValueError, TypeError, KeyError):
            raise UserError(
                f"{folder} has no readable {PRIVACY_FILE}, so the privacy that its run has spent is not known and ε "
                "would come out too small: resume from a checkpoint of a private trainer"
            ) from None
        if version != VERSION:
            raise UserError(f"{folder / PRIVACY_FILE} is of version {version}, and this dpscope reads {VERSION}")
        return record
