"""What `benchmarks.chaos` keeps of a stream and of a kill."""

from __future__ import annotations

import enum
import itertools
import random
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field

from canopy.client import Client
from canopy.results import CanopyError, Chunk, Message, Options
from canopy.stack import START_SECONDS, Child


class Cause(enum.Enum):
    """Why a stream ended."""

    COMPLETED = enum.auto()
    CANCELLED = enum.auto()
    FAILED = enum.auto()


@dataclass(frozen=True, slots=True)
class Plan:
    """A prompt and how it is answered; `index` says which quiet answer it must equal."""

    index: int
    messages: tuple[Message, ...]
    options: Options


@dataclass(slots=True)
class Stream:
    """One answer as it came. `begun`, `times`: when asked, and of each chunk, by time.monotonic."""

    plan: Plan
    cancel_after: int | None = None  # tokens
    tokens: list[int] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    begun: float = 0.0
    cause: Cause = Cause.FAILED
    failure: str = ""

    def read(self, client: Client) -> Stream:
        """Reads it to its end, or to where the client leaves; returns itself."""
        self.begun = time.monotonic()
        events = client.stream(self.plan.messages, self.plan.options)
        try:
            with closing(events):  # type: ignore[type-var]  # a generator, which can be closed
                for event in events:
                    if not isinstance(event, Chunk):
                        self.cause = Cause.COMPLETED
                        break
                    self.times.append(time.monotonic())
                    self.tokens += event.token_ids
                    self.margins += event.pick_margins
                    if self.cancel_after is not None and len(self.tokens) >= self.cancel_after:
                        self.cause = Cause.CANCELLED
                        break
        except CanopyError as error:
            self.failure = str(error)
        return self


@dataclass(slots=True)
class Kill:
    """A replica's death and, later, its return. `silent`: its sockets stayed open for a while, as
    when a host dies.
    """

    name: str
    at: float
    silent: bool = False
    child: Child | None = None
    recovery_seconds: float = 0.0

    @property
    def service(self) -> str:
        return self.name.partition("-")[0]

    @property
    def kind(self) -> str:
        return f"{self.service}_silent" if self.silent else self.service

    def is_back(self) -> bool:
        """Whether the new process serves."""
        assert self.child is not None
        if not self.recovery_seconds and "serving" in self.child.announced:
            self.recovery_seconds = self.child.announced["serving"] - self.at
        return bool(self.recovery_seconds)

    def wait_until_back(self) -> None:
        assert self.child is not None
        if not self.is_back():
            self.child.await_event("serving", time.monotonic() + START_SECONDS)
            self.is_back()


class Load:
    """So many streams at a time, one after the other on each thread."""

    def __init__(
        self, client: Client, plans: Sequence[Plan], cancel_share: float, chance: random.Random
    ) -> None:
        self._client, self._plans = client, plans
        self._cancel_share, self._chance = cancel_share, chance
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._streams: list[Stream] = []
        self._threads: list[threading.Thread] = []

    def start(self, num_threads: int) -> None:
        self._threads = [threading.Thread(target=self._run) for _ in range(num_threads)]
        for thread in self._threads:
            thread.start()

    def finish(self) -> list[Stream]:
        """Every stream, once those under way have come to their end."""
        self._stopping.set()
        for thread in self._threads:
            thread.join()
        return self._streams

    def _run(self) -> None:
        while not self._stopping.is_set():
            stream = self._next()
            stream.read(self._client)
            if stream.cause is Cause.FAILED:
                time.sleep(0.5)  # a router that refuses is not to be flooded

    def _next(self) -> Stream:
        with self._lock:
            plan = self._chance.choice(self._plans)
            most = plan.options.max_tokens or 1
            leaves = self._chance.random() < self._cancel_share
            stream = Stream(plan, self._chance.randrange(1, most) if leaves else None)
            self._streams.append(stream)
            return stream


def first_wait(stream: Stream) -> float:
    """Seconds to the first chunk."""
    return stream.times[0] - stream.begun if stream.times else 0.0


def longest_wait(stream: Stream) -> float:
    """Seconds between two chunks."""
    return max((b - a for a, b in itertools.pairwise(stream.times)), default=0.0)


def gaps_around(kill: Kill, streams: Sequence[Stream]) -> list[float]:
    """The wait in which the kill fell, of every stream that ran then and went on."""
    gaps = []
    for stream in streams:
        for before, after in itertools.pairwise(stream.times):
            if before <= kill.at < after:
                gaps.append(after - before)
    return gaps
