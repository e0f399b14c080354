"""Every script here imports this first: where dpscope cannot be imported it says what to type, and exits with 2.

`python scripts/door.py METHOD…` does the same for the shell scripts, and refuses methods that dpscope does not know.
"""

import shlex
import sys
from pathlib import Path

CLONE = Path(__file__).resolve().parents[1]

try:
    from dpscope.endings import ends_in_a_sentence
except ModuleNotFoundError as error:
    if error.name != "dpscope":
        raise
    install = shlex.join([sys.executable, "-m", "pip", "install", str(CLONE)])
    print(f"Error: dpscope is not installed in this Python. To install: {install}", file=sys.stderr)
    sys.exit(2)

with ends_in_a_sentence():
    from dpscope.packages import require

    require("click", "rich")  # what its commands import as they are loaded

__all__ = ["ends_in_a_sentence"]

if __name__ == "__main__":
    with ends_in_a_sentence():
        from dpscope.vocabulary.methods import resolve_method

        for name in sys.argv[1:]:
            resolve_method(name)
