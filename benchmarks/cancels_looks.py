"""What `benchmarks.cancels` sees of a process when all has come to rest."""

from __future__ import annotations

import os
import time
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from canopy.stack import Child, Stack

REST_SECONDS = 90.0
THREAD_SLACK = 4
"""gRPC's own pool of threads wavers by a few."""

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Look:
    """`held`: sequences, or generations of the router. `pages`: live and reserved."""

    held: int
    pages: int
    tasks: int
    files: int
    threads: int
    resident_mib: float
    cpu_seconds: float

    def figures(self) -> dict[str, float]:
        figures: dict[str, float] = asdict(self)
        return {name: round(value, 1) for name, value in figures.items()}

    def growth_since(self, before: Look, memory_slack_mib: float) -> dict[str, float]:
        """What is held now, and what is more than it was."""
        growth: dict[str, float] = {"held": self.held, "pages": self.pages}
        for name, slack in (("tasks", 0), ("files", 0), ("threads", THREAD_SLACK)):
            more = getattr(self, name) - getattr(before, name)
            growth[name] = more if more > slack else 0
        memory = self.resident_mib - before.resident_mib
        growth["resident_mib"] = round(memory, 1) if memory > memory_slack_mib else 0.0
        return {name: value for name, value in growth.items() if value}


def look_at_rest(stack: Stack) -> dict[str, Look]:
    """At each service, when nothing is held and the tasks are as few as before, or after a while.

    A scrape's socket is open for a moment longer than the scrape: each look stands apart from the
    one before.
    """
    deadline, before = time.monotonic() + REST_SECONDS, -1
    while True:
        looks = {name: _look_at(child) for name, child in stack.children.items()}
        tasks = sum(seen.tasks for seen in looks.values())
        at_rest = not any(seen.held or seen.pages for seen in looks.values()) and tasks == before
        if at_rest or time.monotonic() >= deadline:
            return looks
        before = tasks
        time.sleep(0.7)


def _look_at(child: Child) -> Look:
    proc = Path(f"/proc/{child.process.pid}")
    num_files = len(list((proc / "fd").iterdir()))  # before the scrape opens one more
    with urllib.request.urlopen(f"http://{child.metrics_address}/metrics", timeout=30) as page:
        families = list(text_string_to_metric_families(page.read().decode()))
    samples = [sample for family in families for sample in family.samples]

    def total(name: str, **labels: str) -> float:
        return sum(
            sample.value
            for sample in samples
            if sample.name == f"canopy_{child.service}_{name}"
            and labels.items() <= sample.labels.items()
        )

    status = dict(
        line.split(":", 1) for line in (proc / "status").read_text().splitlines() if ":" in line
    )
    times = (proc / "stat").read_text().rsplit(")", 1)[1].split()[11:13]
    return Look(
        held=int(total("running_requests") + total("sequences")),
        pages=int(total("kv_pages", state="live") + total("kv_pages", state="reserved")),
        tasks=int(total("event_loop_tasks")),
        files=num_files,
        threads=int(status["Threads"]),
        resident_mib=int(status["VmRSS"].split()[0]) / 1024,
        cpu_seconds=sum(map(int, times)) / TICKS_PER_SECOND,
    )
