"""`python -m router`, which is also `canopy serve router`."""

import sys

from common.entry import run_program


def _run() -> int:
    from router.main import main

    return main()


sys.exit(run_program("canopy serve router", _run))
