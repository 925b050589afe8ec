"""`python -m router`, which is also `canopy serve router`."""

import sys

from common.errors import exit_with_one_line
from router.main import main

sys.exit(exit_with_one_line("canopy serve router", main))
