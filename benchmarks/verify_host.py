"""Host time of a verify step: everything but the device and the sockets.

`python -m benchmarks.verify_host [--batch 1,16,64] [--nodes 16] [--steps 300]` sends frames of
trees through codec, state machine and the engine's packing and back into frames, with a device that
costs nothing and accepts three nodes of each tree, and prints one JSON line: milliseconds of CPU a
step (median and p99) by batch, and where they go.

A step is one transfer to the device (`upload`: everything in one buffer) and one back (`download`:
tokens, paths, margins and log-probabilities in one array), beside the features of committed rows,
which come after them, and what few ask for: the likeliest tokens, and the prompt's.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from canopy.v1 import types_pb2, verify_pb2
from common.process import tune_malloc
from verify_service.batch import BatchShape, Bucket, pack
from verify_service.codec import decode_request, encode_events
from verify_service.limits import VerifyLimits
from verify_service.machine import VerifyMachine
from verify_service.outcomes import cut_outcomes
from verify_service.step import SequenceOutcome, SequenceWork

PROMPT_TOKENS = 256
NUM_ACCEPTED = 3
FEATURE_WIDTH = 1728  # SmolLM2's three captured boundaries


class TrivialEngine:
    """What `DeviceEngine` does on the host, with a device that costs nothing: it accepts the first
    nodes of every tree, which is a chain there, and picks token 1.
    """

    def __init__(self, batch: int, limits: VerifyLimits) -> None:
        self.limits = limits
        self.shape = BatchShape(
            max_sequences=batch,
            pages_per_sequence=limits.max_context_len // limits.page_size,
            ancestor_words=limits.max_tree_nodes // 32,
            max_stop_tokens=limits.max_stop_tokens,
            max_depth=limits.max_tree_depth,
        )
        self.bucket = Bucket(limits.max_step_tokens, batch * limits.max_tree_nodes)
        self._features = np.zeros((limits.max_step_tokens, FEATURE_WIDTH), np.float32)

    def upload(self, works: Sequence[SequenceWork]) -> None:
        """Checks the works and fills the one buffer that goes to the device."""
        for work in works:
            work.validate(self.limits.vocab_size, self.limits.page_size)
        pack(works, self.shape, self.bucket)

    def results(self, works: Sequence[SequenceWork]) -> dict[str, npt.NDArray[np.generic]]:
        """As they would come back."""
        packing = self.shape.results()
        small = packing.views(np.zeros(packing.size, np.int32))
        small["emitted"][:] = 1
        node = 0
        for slot, work in enumerate(works):
            accepted = min(NUM_ACCEPTED, max(0, work.num_nodes - 1))
            small["num_accepted"][slot] = accepted
            small["accepted"][slot, :accepted] = np.arange(node + 1, node + 1 + accepted)
            node += work.num_nodes
        return small

    def download(
        self, works: Sequence[SequenceWork], small: dict[str, npt.NDArray[np.generic]]
    ) -> list[SequenceOutcome]:
        return cut_outcomes(
            works, [None] * len(works), small, top=None, prompt=None, features=self._features
        )

    def run(self, works: Sequence[SequenceWork]) -> list[SequenceOutcome]:
        self.upload(works)
        return self.download(works, self.results(works))


def _machine(batch: int) -> tuple[VerifyMachine, TrivialEngine]:
    limits = VerifyLimits(
        vocab_size=32000,
        max_context_len=8192,
        max_tree_nodes=64,
        max_tree_depth=16,
        max_sequences=batch,
        max_waiting_sequences=0,
        page_size=16,
        num_pages=600 * batch,
        max_step_tokens=64 * batch + 256,
        max_prefill_tokens=256,
        max_stop_tokens=8,
    )
    machine = VerifyMachine(limits)
    machine.connect(1)
    return machine, TrivialEngine(batch, limits)


def _open(ids: Sequence[bytes]) -> bytes:
    commands = [
        verify_pb2.VerifyCommand(
            sequence_id=i,
            epoch=1,
            open=verify_pb2.VerifyOpen(
                tokens=[1] * PROMPT_TOKENS,
                num_prompt_tokens=PROMPT_TOKENS,
                max_total_tokens=8192,
                wants_features=True,
            ),
        )
        for i in ids
    ]
    return verify_pb2.VerifyRequest(commands=commands).SerializeToString()


def _trees(ids: Sequence[bytes], round_: int, kv_len: int, num_nodes: int) -> bytes:
    """A frame of one tree per sequence: a chain of three, the rest below the root."""
    tree = types_pb2.DraftTree(
        tokens=[1] * num_nodes,
        parents=[0] + [i if i < NUM_ACCEPTED else 0 for i in range(num_nodes - 1)],
        scores=[-0.1 * i for i in range(num_nodes)],
    )
    body = verify_pb2.VerifyTree(round=round_, kv_len=kv_len, tree=tree)
    commands = [
        verify_pb2.VerifyCommand(sequence_id=i, epoch=1, acked_round=round_ - 1, verify_tree=body)
        for i in ids
    ]
    return verify_pb2.VerifyRequest(commands=commands).SerializeToString()


def _one_step(machine: VerifyMachine, engine: TrivialEngine, frame: bytes) -> list[float]:
    """Seconds of decode + handle, plan, upload, download, retire, features + encode."""
    marks = [time.thread_time()]
    commands, _ = decode_request(1, verify_pb2.VerifyRequest.FromString(frame))
    machine.handle(1, commands, marks[0])
    marks.append(time.thread_time())
    works = machine.plan(marks[-1]).works
    marks.append(time.thread_time())
    engine.upload(works)
    marks.append(time.thread_time())
    small = engine.results(works)
    marks.append(time.thread_time())
    outcomes = engine.download(works, small)
    marks.append(time.thread_time())
    events = machine.retire(works, outcomes, marks[-1])
    marks.append(time.thread_time())
    encode_events(events).SerializeToString()
    while machine.next_features(1, 1 << 20) is not None:
        pass
    marks.append(time.thread_time())
    seconds = np.diff(marks)
    return np.delete(seconds, 3).tolist()  # without the stand-in for the device


def measure(batch: int, num_nodes: int, steps: int) -> dict[str, float]:
    """Milliseconds per step."""
    machine, engine = _machine(batch)
    ids = [i.to_bytes(16, "big") for i in range(batch)]
    commands, _ = decode_request(1, verify_pb2.VerifyRequest.FromString(_open(ids)))
    machine.handle(1, commands, 0.0)
    while works := machine.plan(0.0).works:
        machine.retire(works, engine.run(works), 0.0)
    emitted = min(NUM_ACCEPTED, num_nodes - 1) + 1
    parts = []
    for step in range(steps):
        frame = _trees(ids, step + 1, PROMPT_TOKENS + step * emitted, num_nodes)
        parts.append(_one_step(machine, engine, frame))
    machine.check_balance()
    milliseconds = np.array(parts) * 1e3
    total = milliseconds.sum(axis=1)
    names = ("decode_and_handle", "plan", "upload", "download", "retire", "encode_and_features")
    medians = dict(zip(names, np.median(milliseconds, axis=0).round(4).tolist(), strict=True))
    return {
        "batch": batch,
        "host_ms": round(float(np.median(total)), 4),
        "host_ms_p99": round(float(np.percentile(total, 99)), 4),
        **medians,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", default="1,16,64")
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()
    tune_malloc()  # as the servers do
    batches = [int(part) for part in arguments.batch.split(",")]
    results = [measure(b, arguments.nodes, arguments.steps) for b in batches]
    print(json.dumps({"benchmark": "verify_host", "nodes": arguments.nodes, "results": results}))


if __name__ == "__main__":
    main()
