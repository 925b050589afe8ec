"""The target's states of every training token, computed once and kept on disk as float16.

    DIR/meta.json      what the cache belongs to: target, data, boundaries, sizes
    DIR/features.npy   [total tokens, F]   residual stream entering the captured layers
    DIR/hidden.npy     [total tokens, Ht]  after the final norm; teacher logits are lm_head of it
    DIR/done.txt       indices of the sequences written so far, one a line

Rows of a sequence are consecutive, sequences in file order. Capture can be stopped and goes on
where it stood; training may begin on the part that is done. float16 holds the residual stream of
the models seen so far (largest value 2.5e4, at the first token); capture refuses values that it
cannot hold.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from common.types import Int32Array
from draft_service.training.dataset import BatchPlan, Sample
from draft_service.training.loss import Batch

Float16Array = npt.NDArray[np.float16]
TargetStates = Callable[[Int32Array], tuple[npt.NDArray[np.floating], npt.NDArray[np.floating]]]
"""tokens int32 [B, T] → features [B, T, F], hidden [B, T, Ht]; right padding is harmless
(causal)."""


@dataclass(frozen=True)
class CacheMeta:
    """What a cache belongs to; two runs may share one only if all of it is equal."""

    target_sha256: str
    data_sha256: str
    boundaries: tuple[int, ...]
    feature_size: int
    hidden_size: int
    total_tokens: int

    def to_json(self) -> str:
        return json.dumps({**self.__dict__, "boundaries": list(self.boundaries)}, indent=1)


def digest_of(samples: Sequence[Sample]) -> str:
    """SHA-256 over lengths and tokens of all sequences."""
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(np.array([sample.prompt.size, sample.response.size], np.int32).tobytes())
        digest.update(sample.tokens.tobytes())
    return digest.hexdigest()


class FeatureCache:
    """Memory-mapped states of `samples`; opened for capture (created if need be) or for
    training."""

    def __init__(self, directory: Path, samples: Sequence[Sample], meta: CacheMeta) -> None:
        """Raises ValueError naming the field in which an existing cache differs."""
        self.directory = directory
        self.samples = samples
        self.meta = meta
        lengths = [sample.num_tokens for sample in samples]
        self.offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        if int(self.offsets[-1]) != meta.total_tokens:
            raise ValueError(
                f"cache: {meta.total_tokens} tokens said, {self.offsets[-1]} in the data"
            )
        directory.mkdir(parents=True, exist_ok=True)
        self._check_meta()
        self.features = self._open("features.npy", meta.feature_size)
        self.hidden = self._open("hidden.npy", meta.hidden_size)

    def _check_meta(self) -> None:
        path = self.directory / "meta.json"
        if not path.exists():
            path.write_text(self.meta.to_json())
            return
        found, wanted = json.loads(path.read_text()), json.loads(self.meta.to_json())
        for field, value in wanted.items():
            if found.get(field) != value:
                raise ValueError(
                    f"cache: {self.directory} was made for {field} = {found.get(field)!r}, this run"
                    f" needs {value!r}; choose another data.cache or delete that directory"
                )

    def _open(self, name: str, width: int) -> Float16Array:
        path = self.directory / name
        shape = (self.meta.total_tokens, width)
        if not path.exists():
            np.lib.format.open_memmap(path, "w+", np.float16, shape)
        array: Float16Array = np.load(path, mmap_mode="r+")
        if array.shape != shape:
            raise ValueError(f"cache: {path} has shape {array.shape}, not {shape}; delete it")
        return array

    def done(self) -> Int32Array:
        """Sorted indices of the sequences whose states are on disk."""
        path = self.directory / "done.txt"
        if not path.exists():
            return np.zeros(0, np.int32)
        lines = path.read_text().split("\n")[:-1]  # a line without its end was cut off: not done
        return np.unique(np.array([int(line) for line in lines if line], np.int32))

    def rows(self, index: int) -> tuple[Float16Array, Float16Array]:
        """Views of features [n, F] and hidden [n, Ht] of one sequence."""
        span = slice(int(self.offsets[index]), int(self.offsets[index + 1]))
        return self.features[span], self.hidden[span]

    def batch(self, plan: BatchPlan, num_steps: int) -> Batch:
        """The padded arrays of `plan` on the host, as `loss.Batch` describes them."""
        p, s, b = plan.prompt_columns, plan.response_columns, plan.num_rows
        columns, teacher_rows = p + s - 2, s + num_steps - 1
        tokens = np.zeros((b, p + s + num_steps), np.int32)
        features = np.zeros((b, columns, self.meta.feature_size), np.float16)
        hidden = np.zeros((b, teacher_rows, self.meta.hidden_size), np.float16)
        starts = np.full(b, p + s, np.int32)
        ends = np.zeros(b, np.int32)
        for row, index in enumerate(plan.indices):
            sample = self.samples[index]
            cut = max(0, sample.prompt.size - p)  # a long prompt's head falls off
            kept = sample.tokens[cut : cut + (p + s)][: sample.prompt.size - cut + s]
            feature_rows, hidden_rows = self.rows(index)
            start = p - (sample.prompt.size - cut)
            end = start + kept.size
            tokens[row, start:end] = kept
            paired = min(end, columns)
            features[row, start:paired] = feature_rows[cut : cut + paired - start]
            taught = hidden_rows[sample.prompt.size - 1 :][: min(teacher_rows, end - p + 1)]
            hidden[row, : len(taught)] = taught
            starts[row], ends[row] = start, end
        return Batch(tokens, features, hidden, starts, ends)  # type: ignore[arg-type]


def capture(
    cache: FeatureCache, states: TargetStates, batch_tokens: int = 4096, seed: int = 0
) -> Iterator[int]:
    """Computes what is missing, batches in random order; yields the tokens done after each
    batch."""
    missing = np.setdiff1d(np.arange(len(cache.samples), dtype=np.int32), cache.done())
    batches = _length_batches(cache.samples, missing, batch_tokens)
    order = np.random.default_rng(seed).permutation(len(batches))
    num_tokens = 0
    with (cache.directory / "done.txt").open("a") as done:
        for number in order:
            columns, indices = batches[number]
            rows = max(1, batch_tokens // columns)  # one shape per column count
            tokens = np.zeros((rows, columns), np.int32)
            for row, index in enumerate(indices):
                tokens[row, : cache.samples[index].num_tokens] = cache.samples[index].tokens
            features, hidden = states(tokens)
            for row, index in enumerate(indices):
                length = cache.samples[index].num_tokens
                _store(cache, index, features[row, :length], hidden[row, :length])
                num_tokens += length
            done.write("".join(f"{index}\n" for index in indices))
            done.flush()
            yield num_tokens


def _store(
    cache: FeatureCache,
    index: int,
    features: npt.NDArray[np.floating],
    hidden: npt.NDArray[np.floating],
) -> None:
    limit = float(np.finfo(np.float16).max)
    for name, array in (("features", features), ("hidden", hidden)):
        largest = float(np.abs(array).max())
        if not largest <= limit:  # NaN too
            raise ValueError(f"{name} of sequence {index} reach {largest}; float16 holds {limit}")
    feature_rows, hidden_rows = cache.rows(index)
    feature_rows[:], hidden_rows[:] = features, hidden


def _length_batches(
    samples: Sequence[Sample], indices: Int32Array, batch_tokens: int
) -> list[tuple[int, list[int]]]:
    """(columns, indices) with columns a multiple of 64 and at most batch_tokens in all."""
    groups: dict[int, list[int]] = {}
    for index in indices:
        columns = -(-samples[int(index)].num_tokens // 64) * 64
        groups.setdefault(columns, []).append(int(index))
    return [
        (columns, members[start : start + max(1, batch_tokens // columns)])
        for columns, members in sorted(groups.items())
        for start in range(0, len(members), max(1, batch_tokens // columns))
    ]
