"""`python -m draft_service`, which is also `canopy serve draft`."""

import sys

from common.errors import exit_with_one_line
from draft_service.main import main

sys.exit(exit_with_one_line("canopy serve draft", main))
