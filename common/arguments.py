"""Command lines that say what is wrong with them in one line."""

from __future__ import annotations

import argparse
from typing import NoReturn


class OneLineParser(argparse.ArgumentParser):
    """A wrong flag is one line on stderr that names it, and exit code 2; its subcommands' too."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {' '.join(message.split())}; see `{self.prog} --help`\n")
