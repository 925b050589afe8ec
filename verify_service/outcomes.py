"""From a step's arrays on the host to what each of its works got."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from common.types import TopLogprobs
from verify_service.batch import scored_nodes
from verify_service.follow_up import Chosen
from verify_service.step import SequenceOutcome, SequenceWork

HostArrays = Mapping[str, npt.NDArray[Any]]


def cut_outcomes(
    works: Sequence[SequenceWork],
    chosen: Sequence[Chosen | None],
    small: HostArrays,
    *,
    top: HostArrays | None,
    prompt: HostArrays | None,
    features: npt.NDArray[Any] | None,
) -> list[SequenceOutcome]:
    """In the works' order. `chosen`: what each verified if it followed. `small`, `top`, `prompt`:
    as in `program.StepOutput`; `features` [T, F]. None: no work wants any.
    """
    outcomes = []
    row = node = 0
    scored_of = scored_nodes(works)
    for slot, (work, tree, scored) in enumerate(zip(works, chosen, scored_of, strict=True)):
        count = int(small["num_accepted"][slot]) if work.samples else 0
        emitted = small["emitted"][slot, : count + 1]
        if not work.samples or emitted[0] < 0:
            emitted = emitted[:0]
        num_emitted = emitted.size
        path = small["accepted"][slot, :count] - node
        rows = None
        num_causal, num_nodes = work.num_causal, work.num_nodes
        if work.follows is not None:
            num_causal, num_nodes = (0, 0) if tree is None else (1, tree.tree.num_nodes)
        if features is not None and work.wants_features:
            last = row + num_causal
            committed = [*range(row, last), *(last - 1 + node for node in path.tolist())]
            rows = features[committed]
        prompt_logprobs: tuple[float, ...] = ()
        if prompt is not None and work.num_scored:
            prompt_logprobs = tuple(prompt["logprobs"][scored].tolist())
        outcomes.append(
            SequenceOutcome(
                tokens=emitted,
                margins=small["margins"][slot, :num_emitted],
                logprobs=small["logprobs"][slot, :num_emitted],
                accepted_nodes=path.astype(np.int32),
                num_nodes=num_nodes,
                num_committed=num_causal + count,
                features=rows,
                top_logprobs=_top(top, (slot, slice(num_emitted)), work.sampling.top_logprobs),
                prompt_logprobs=prompt_logprobs,
                prompt_top_logprobs=_top(prompt, scored, work.sampling.prompt_logprobs or 0),
                chosen=tree,
            )
        )
        row += work.num_rows
        node += work.num_nodes
    return outcomes


def _top(arrays: HostArrays | None, places: Any, count: int) -> tuple[TopLogprobs, ...]:
    """The `count` likeliest at each of the places."""
    if arrays is None or not count:
        return ()
    tokens = arrays["top_tokens"][places][:, :count].tolist()
    values = arrays["top_logprobs"][places][:, :count].tolist()
    return tuple(tuple(zip(*place, strict=True)) for place in zip(tokens, values, strict=True))
