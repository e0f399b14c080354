"""One rank of a measurement over several processes: `python -m dpscope.runner.rank_steps SPEC FILES FOLDER`.

torch.distributed.run starts it once a rank. Each writes FOLDER/RANK.json with what it measured, or how it failed.
Further files of the row go to FILES.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

from dpscope.endings import outcome_of_exception
from dpscope.instruments.processes import end_with_lifeline
from dpscope.results.store import write_atomically
from dpscope.runner import collector
from dpscope.runner.rank_launcher import RankOutcome, end_rank
from dpscope.runner.spec import RunSpec
from dpscope.vocabulary.statuses import OK


def measure_or_explain(spec: RunSpec, files: Path) -> RankOutcome:
    """Measure this rank, or say why it could not. The traceback goes to standard error."""
    from dpscope.runner.measure import measurement_module

    try:
        figures = measurement_module(spec.instrument).measure_rank(spec, files)
        return {"status": OK, "reason": None, "figures": figures}
    except Exception as error:
        traceback.print_exc()
        status, reason = outcome_of_exception(error)
        return {"status": status, "reason": reason, "figures": None}


def main() -> None:
    collector.rest()
    end_with_lifeline()
    spec, files, folder = RunSpec.from_dict(json.loads(sys.argv[1])), Path(sys.argv[2]), Path(sys.argv[3])
    outcome = measure_or_explain(spec, files)
    write_atomically(folder / f"{os.environ['RANK']}.json", json.dumps(outcome))
    end_rank(ok=outcome["status"] == OK)


if __name__ == "__main__":
    main()
