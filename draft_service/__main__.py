"""`python -m draft_service`, which is also `canopy serve draft`."""

import sys

from common.entry import run_program


def _run() -> int:
    from draft_service.main import main

    return main()


sys.exit(run_program("canopy serve draft", _run))
