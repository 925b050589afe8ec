"""How long a step takes, measured before the first request: points over rows, prefix and batch.

The works are made up and touch pages that nobody owns yet; what they leave there is never read,
because a sequence writes its rows before it attends to them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from common.types import SamplingParams
from verify_service.engine import DeviceEngine
from verify_service.step import SequenceWork, StepPoint

REPEATS = 3  # the fastest counts: what disturbs a step only ever makes it longer
LONG_PREFIX_TOKENS = 1024


def measure(engine: DeviceEngine) -> tuple[StepPoint, ...]:
    """Of every bucket: one sequence without and with a prefix, and as many as there may be."""
    points = []
    for num_rows in sorted({bucket.num_rows for bucket in engine.config.buckets()}):
        room = engine.config.max_context_len - num_rows
        most = min(engine.config.max_sequences, num_rows)
        cases = {(1, 0), (1, min(LONG_PREFIX_TOKENS, room)), (most, 0)}
        for num_sequences, kv_len in sorted(cases):
            works = _works(engine, num_rows, num_sequences, kv_len)
            if works is not None:
                points.append(_point(engine, works))
    return tuple(points)


def _point(engine: DeviceEngine, works: Sequence[SequenceWork]) -> StepPoint:
    engine.run(works)  # the first run of a program is slower
    times = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        engine.run(works)
        times.append(time.perf_counter() - begun)
    return StepPoint(
        sum(work.num_rows for work in works),
        sum(work.kv_len for work in works),
        len(works),
        min(times),
    )


def _works(
    engine: DeviceEngine, num_rows: int, num_sequences: int, kv_len: int
) -> list[SequenceWork] | None:
    """Sequences of equal blocks, each a prefill chunk with a root; None if pages do not suffice."""
    config = engine.config
    shares = [
        num_rows * (i + 1) // num_sequences - num_rows * i // num_sequences
        for i in range(num_sequences)
    ]
    works: list[SequenceWork] = []
    page = 0
    for slot, share in enumerate(shares):
        num_pages = -(-(kv_len + share) // config.page_size)
        if page + num_pages > config.num_pages or kv_len + share > config.max_context_len:
            return None
        works.append(
            SequenceWork(
                slot=slot,
                tokens=np.zeros(share, np.int32),
                parents=np.arange(-1, share - 1, dtype=np.int32),
                num_causal=share,
                samples=True,
                kv_len=kv_len,
                page_ids=np.arange(page, page + num_pages, dtype=np.int32),
                sampling=SamplingParams(temperature=0.0),
            )
        )
        page += num_pages
    return works
