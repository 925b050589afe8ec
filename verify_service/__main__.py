"""`python -m verify_service`, which is also `canopy serve verify`."""

import sys

from common.errors import exit_with_one_line
from verify_service.main import main

sys.exit(exit_with_one_line("canopy serve verify", main))
