"""`canopy`, which is also `python -m canopy`."""

from __future__ import annotations

import sys

from common.entry import run_program


def main() -> int:
    """Runs one subcommand; returns its exit code. 130 after Ctrl-C, 143 after SIGTERM."""
    return run_program("canopy", _run)


def _run() -> int:
    from canopy import cli

    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
