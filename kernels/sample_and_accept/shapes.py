"""Shapes of sampling that tests and benchmarks share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleShape:
    """N rows of logits over V tokens, for B sequences."""

    name: str
    num_nodes: int
    vocab_size: int
    num_sequences: int


EDGE_SHAPES = (
    SampleShape(name="one row", num_nodes=1, vocab_size=8, num_sequences=1),
    SampleShape(name="one token", num_nodes=2, vocab_size=1, num_sequences=2),
    SampleShape(name="odd vocabulary", num_nodes=9, vocab_size=131, num_sequences=2),
)

PRODUCTION_SHAPES = (
    SampleShape(name="smollm2 root", num_nodes=1, vocab_size=49152, num_sequences=1),
    SampleShape(name="smollm2 tree", num_nodes=16, vocab_size=49152, num_sequences=1),
    SampleShape(name="smollm2 batch of 4", num_nodes=64, vocab_size=49152, num_sequences=4),
    SampleShape(
        name="llama-3.1-8b batch of 16", num_nodes=256, vocab_size=128256, num_sequences=16
    ),
)
