"""A fault drill on the real set-up: the draft is killed under load; does the right alert tell?

    python -m benchmarks.fault_drill [--pictures docs/pictures]

Starts the three services and a real Prometheus with the chart's rules, windows unshortened.
Requests run all the time; none may fail. Then the draft is killed with SIGKILL, and later started
again. Prints when CanopyDraftUnavailable became pending, fired and cleared, and every other alert
that fired; `--pictures` draws the dashboards over the whole drill. Needs Debian's prometheus.
"""

from __future__ import annotations

import argparse
import threading
import time
from pathlib import Path

from benchmarks.serving import print_report
from canopy import library
from canopy.client import Client
from canopy.results import CanopyError, Message, Options
from canopy.stack import Child, Stack, StackSettings
from tools.prometheus_server import PrometheusServer

ALERT = "CanopyDraftUnavailable"
PROMPTS = (
    "Why does bread rise?",
    "Name three rivers and say where they flow.",
    "Write a short poem about rain.",
    "What is a prime number? Give examples.",
)
SETTLE_SECONDS = 2.0
"""For the last scrape and evaluation."""


class Load:
    """Clients that ask one request after the other until stopped."""

    def __init__(self, address: str, num_clients: int) -> None:
        self._client = Client(address)
        self._stop = threading.Event()
        self.answered = 0
        self.failures: list[str] = []
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._ask, args=(number,)) for number in range(num_clients)
        ]
        for thread in self._threads:
            thread.start()

    def _ask(self, number: int) -> None:
        count = number
        while not self._stop.is_set():
            options = Options(max_tokens=24 + 8 * (count % 5), seed=count)
            try:
                self._client.generate([Message("user", PROMPTS[count % len(PROMPTS)])], options)
            except CanopyError as error:
                with self._lock:
                    self.failures.append(str(error))
            else:
                with self._lock:
                    self.answered += 1
            count += 1

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self._client.close()


class Watch:
    """Notes when each alert became pending, fired and went, in seconds since the start."""

    def __init__(self, server: PrometheusServer) -> None:
        self._server = server
        self._began = time.monotonic()
        self._states: dict[str, str] = {}
        self.changes: list[tuple[float, str, str]] = []

    def now(self) -> float:
        return time.monotonic() - self._began

    def until(self, seconds: float, alert: str = "", state: str | None = "") -> float | None:
        """Watches for `seconds`, or until `alert` is in `state` (None: gone); the time it was."""
        deadline = self.now() + seconds
        while self.now() < deadline:
            states = self._server.alerts()
            for name in states.keys() | self._states.keys():
                new = states.get(name, "cleared")
                if new != self._states.get(name, "cleared"):
                    self.changes.append((round(self.now(), 1), name, new))
            self._states = states
            if alert and states.get(alert) == state:
                return self.now()
            time.sleep(0.2)
        return None


def restart_draft(stack: Stack, settings: StackSettings) -> None:
    """A new draft at the dead one's address, as Kubernetes would bring about."""
    dead = stack.children["draft"]
    flags = ["--head", str(settings.head), "--target", str(settings.model)]
    flags += ["--port", dead.address.rpartition(":")[2]]
    flags += ["--metrics-port", dead.metrics_address.rpartition(":")[2]]
    stack.children["draft"] = Child("draft", flags, show_logs=False)
    stack.children["draft"].await_event("serving", time.monotonic() + 300)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--calm-seconds", type=float, default=60.0, help="before, and after")
    parser.add_argument("--pictures", type=Path, help="directory for pictures of the dashboards")
    arguments = parser.parse_args()
    model = library.fetch_model(library.DEMO_MODEL)
    settings = StackSettings(model=model, head=library.demo_head(model), show_logs=False)
    with Stack(settings) as stack:
        targets = {name: child.metrics_address for name, child in stack.children.items()}
        with PrometheusServer(targets) as server:
            began = time.time()
            result = drill(stack, settings, server, arguments)
            if arguments.pictures:
                from tools.dashboard_panels import BOARDS
                from tools.plot_dashboards import draw

                arguments.pictures.mkdir(parents=True, exist_ok=True)
                for board in BOARDS:
                    draw(
                        board, server, began, time.time(), arguments.pictures / f"{board.name}.png"
                    )
    print_report(result, arguments)


def drill(
    stack: Stack, settings: StackSettings, server: PrometheusServer, arguments: argparse.Namespace
) -> dict[str, object]:
    load, watch = Load(stack.address, arguments.clients), Watch(server)
    try:
        watch.until(arguments.calm_seconds)
        fired_before = [name for _, name, state in watch.changes if state == "firing"]
        stack.children["draft"].process.kill()
        stack.children["draft"].process.wait()
        stack.children["draft"].close()
        killed = watch.now()
        fired = watch.until(180, ALERT, "firing")
        restart_draft(stack, settings)
        serving = watch.now()
        cleared = watch.until(120, ALERT, None)
        watch.until(arguments.calm_seconds)
    finally:
        load.stop()
    time.sleep(SETTLE_SECONDS)
    return {
        "benchmark": "fault_drill",
        "alert": ALERT,
        "fired_after_seconds": round(fired - killed, 1) if fired is not None else None,
        "cleared_after_seconds": round(cleared - serving, 1) if cleared is not None else None,
        "alerts_fired_before_the_fault": len(fired_before),
        "other_alerts_fired": sorted(
            {name for _, name, state in watch.changes if state == "firing" and name != ALERT}
        ),
        "requests_answered": load.answered,
        "requests_failed": len(load.failures),
        "changes": watch.changes,
    }


if __name__ == "__main__":
    main()
