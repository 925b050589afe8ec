"""The spans of requests and rounds: one for each choice, and in it one for each of its rounds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from common.tracing import Tracing
from router.actions import Failed, Finished
from router.generation import Generation
from router.machine import GenerationMachine
from router.messages import RoundResult


class RequestSpans:
    def __init__(self, tracing: Tracing | None) -> None:
        self._tracing = tracing or Tracing()

    @property
    def on(self) -> bool:
        return self._tracing.on

    def begin(self, generation: Generation) -> tuple[Generation, Any]:
        """The generation with what draft and verify are given as parent, and its span or None."""
        trace = generation.trace
        span, child = self._tracing.begin(
            "canopy.request",
            trace.traceparent,
            {
                "canopy.request_id": trace.request_id,
                "canopy.choice_index": generation.choice_index,
                "canopy.num_prompt_tokens": len(generation.prompt_tokens),
            },
        )
        return replace(generation, trace=replace(trace, traceparent=child)), span

    def note_round(self, machine: GenerationMachine, result: RoundResult, now: float) -> None:
        """Of a round whose result has come, before the machine has it. Repetitions are none."""
        if result.round == machine.round and machine.awaits_verify(result.epoch):
            self._tracing.note(
                "canopy.round",
                machine.generation.trace.traceparent,
                max(0.0, now - machine.round_began_at),
                {
                    "canopy.round": result.round,
                    "canopy.num_nodes": result.num_nodes,
                    "canopy.num_emitted": len(result.tokens),
                },
            )

    def end(self, span: Any, machine: GenerationMachine, ending: Finished | Failed | None) -> None:
        """`ending` None: the client went away."""
        outcome, error = "cancelled", ""
        if isinstance(ending, Finished):
            outcome = ending.reason.name.lower()
        elif isinstance(ending, Failed):
            outcome, error = "failed", ending.failure.kind.value
        self._tracing.end(
            span,
            {
                "canopy.outcome": outcome,
                "canopy.num_completion_tokens": machine.num_emitted,
                "canopy.num_rounds": machine.statistics.num_rounds,
                "canopy.num_accepted": machine.statistics.num_accepted,
            },
            error,
        )
