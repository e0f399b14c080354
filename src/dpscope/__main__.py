"""`dpscope`, and `python -m dpscope`."""

from __future__ import annotations

from dpscope.endings import ends_in_a_sentence


def main() -> None:
    with ends_in_a_sentence():  # also where click is not installed
        from dpscope.cli import main as command

        command(prog_name="dpscope")


if __name__ == "__main__":
    main()
