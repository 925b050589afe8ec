"""`python -m verify_service`, which is also `canopy serve verify`."""

import sys

from common.entry import run_program


def _run() -> int:
    from verify_service.main import main

    return main()


sys.exit(run_program("canopy serve verify", _run))
