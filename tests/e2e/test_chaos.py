"""Real processes, killed outright in mid-stream and started anew on their ports."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable

import pytest

from benchmarks.lossless import MARGIN, compare
from canopy.client import Client
from canopy.convert import to_generation
from canopy.results import Chunk, Completion, Generation, Message, Options
from canopy.stack import Stack
from tests.e2e.conftest import wait_until

pytestmark = pytest.mark.e2e

NUM_TOKENS = 96
GREEDY = Options(max_tokens=NUM_TOKENS, ignore_eos=True, token_ids=True, pick_margins=True)
OPTIONS = {
    "Tell me a story about a river.": GREEDY,
    "Why does bread rise?": dataclasses.replace(GREEDY, temperature=0.8, seed=11),
}


class Asked(threading.Thread):
    """One prompt, its answer read on a thread of its own."""

    def __init__(self, client: Client, prompt: str, options: Options) -> None:
        super().__init__(daemon=True)
        self.events: list[Chunk | Completion] = []
        self.num_tokens = 0
        self._client, self._prompt, self._options = client, prompt, options
        self.start()

    def run(self) -> None:
        for event in self._client.stream([Message("user", self._prompt)], self._options):
            self.events.append(event)
            if isinstance(event, Chunk):
                self.num_tokens += len(event.token_ids)

    def answer(self) -> Generation:
        self.join(200)
        assert not self.is_alive()
        return to_generation(self.events)


def test_killed_draft_and_verify_cost_no_token(
    stack: Stack,
    client: Client,
    metric: Callable[[str, str], float],
    pages_settle: Callable[[], bool],
) -> None:
    """The draft's death costs speculation, verify's a wait; the tokens are those of a quiet run."""
    quiet = {p: Asked(client, p, options) for p, options in OPTIONS.items()}
    expected = {prompt: asked.answer() for prompt, asked in quiet.items()}
    before = metric("router", "canopy_router_fail_overs_total")
    running = {p: Asked(client, p, options) for p, options in OPTIONS.items()}

    for name, num_tokens in (("draft", 12), ("verify", 30)):
        assert wait_until(lambda: all(r.num_tokens > num_tokens for r in running.values()), 60)  # noqa: B023
        stack.kill(name)
        stack.restart(name)
    assert all(asked.num_tokens < NUM_TOKENS for asked in running.values()), "killed too late"

    for prompt, asked in running.items():
        answer = asked.answer()
        assert answer.completion.num_completion_tokens == NUM_TOKENS
        found = compare(0, "quiet", answer, expected[prompt].token_ids, answer.pick_margins)
        assert found is None or found.margin < MARGIN, found
        assert answer.completion.speculation.num_root_only_rounds > 0
    assert metric("router", "canopy_router_fail_overs_total") - before == len(OPTIONS)
    assert pages_settle()
    for name in ("draft", "verify"):
        stack.children[name].await_event("serving", time.monotonic() + 240)
