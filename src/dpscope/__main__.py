"""`python -m dpscope` is `dpscope`."""

from dpscope.cli import main

if __name__ == "__main__":
    main(prog_name="dpscope")
