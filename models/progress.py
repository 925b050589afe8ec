"""A progress bar on the terminal, for what takes more than a moment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)

StageProgress = Callable[[str, int, int], None]
"""(stage in words, units done, units in all); called as often as work goes on."""


@contextmanager
def console_progress(console: Console | None = None) -> Iterator[StageProgress]:
    """Yields a StageProgress that draws one bar per stage on stderr."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    stages: dict[str, TaskID] = {}
    with Progress(*columns, console=console or Console(stderr=True)) as bars:

        def report(stage: str, done: int, total: int) -> None:
            if stage not in stages:
                stages[stage] = bars.add_task(stage, total=total)
            bars.update(stages[stage], completed=done, total=total)

        yield report
