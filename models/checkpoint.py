"""Tensors by name from safetensors (or pickled) files, single or sharded, by byte range.

Only headers are read when a checkpoint is opened; each tensor is read when asked for, into one
buffer of its own size, so that host memory never holds more than the largest tensor beside what was
placed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from models.errors import CheckpointError

HostArray = npt.NDArray[Any]

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
PICKLED_FILE = "pytorch_model.bin"
PICKLED_INDEX_FILE = "pytorch_model.bin.index.json"
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format
FETCH_AGAIN = "download the model again or point to a complete directory"

SAFETENSORS_DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a tensor lies: `size_bytes` at `offset` of `file`.

    `strides` in elements, None for the usual row-major order (only pickled files need others).
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    file: Path
    offset: int
    size_bytes: int
    strides: tuple[int, ...] | None = None

    def read(self) -> HostArray:
        """The tensor, row-major, in its stored dtype. Raises CheckpointError."""
        flat = self._read_bytes(0, self.size_bytes).view(self.dtype)
        if self.strides is None:
            return flat.reshape(self.shape)
        steps = tuple(stride * self.dtype.itemsize for stride in self.strides)
        strided = np.lib.stride_tricks.as_strided(flat, self.shape, steps, writeable=False)
        return np.ascontiguousarray(strided)

    def read_blocks(
        self, max_bytes: int, start: int = 0, stop: int | None = None
    ) -> Iterator[tuple[int, HostArray]]:
        """(first row, rows) after (first row, rows), each of at most `max_bytes` or one row, of
        rows [start, stop) alone.

        Pickled tensors of unusual order come whole, as one block. Raises CheckpointError.
        """
        if self.strides is not None or not self.shape:
            yield 0, self.read()
            return
        num_rows = self.shape[0]
        row_bytes = self.size_bytes // max(num_rows, 1)
        stop = num_rows if stop is None else min(stop, num_rows)
        step = max(1, max_bytes // max(row_bytes, 1))
        for first in range(start, stop, step):
            count = min(step, stop - first)
            flat = self._read_bytes(first * row_bytes, count * row_bytes).view(self.dtype)
            yield first, flat.reshape(count, *self.shape[1:])

    def _read_bytes(self, skip: int, size: int) -> npt.NDArray[np.uint8]:
        try:
            buffer = np.fromfile(self.file, np.uint8, size, offset=self.offset + skip)
        except OSError as error:
            raise CheckpointError(
                f"{self.file}: cannot be read ({error}); {FETCH_AGAIN}"
            ) from error
        if buffer.size != size:
            raise CheckpointError(
                f"{self.file}: tensor {self.name} is truncated ({buffer.size} of {size} bytes);"
                f" {FETCH_AGAIN}"
            )
        return buffer


class Checkpoint:
    """The tensors of one model directory or file. `entries` maps name to where it lies."""

    def __init__(self, where: Path, entries: Mapping[str, TensorEntry]) -> None:
        self.where = where
        self.entries = dict(entries)

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    @property
    def names(self) -> list[str]:
        return sorted(self.entries)

    def entry(self, name: str) -> TensorEntry:
        """Raises CheckpointError when the checkpoint has no such tensor."""
        if name not in self.entries:
            raise CheckpointError(f"{self.where}: tensor {name} is missing; {FETCH_AGAIN}")
        return self.entries[name]

    def read(self, name: str, shape: tuple[int, ...] | None = None) -> HostArray:
        """The tensor `name`, of exactly `shape` where given. Raises CheckpointError."""
        return self.checked_entry(name, shape).read()

    def checked_entry(self, name: str, shape: tuple[int, ...] | None) -> TensorEntry:
        """As `read`, without reading yet."""
        entry = self.entry(name)
        if shape is not None and entry.shape != shape:
            raise CheckpointError(
                f"{entry.file}: tensor {name} has shape {list(entry.shape)}, but config.json asks"
                f" for {list(shape)}; the files do not belong together: {FETCH_AGAIN}"
            )
        return entry

    def check_names(self, wanted: Iterable[str], allowed: Iterable[str] = ()) -> None:
        """Every wanted tensor is there and no other, but for `allowed`. Raises CheckpointError."""
        wanted = set(wanted)
        missing = sorted(wanted - self.entries.keys())
        if missing:
            raise CheckpointError(f"{self.where}: {_listed(missing)} missing; {FETCH_AGAIN}")
        unexpected = sorted(self.entries.keys() - wanted - set(allowed))
        if unexpected:
            raise CheckpointError(
                f"{self.where}: {_listed(unexpected)} not part of the model that config.json"
                " describes; serving it without them would give wrong text: check config.json"
            )


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return f"tensor {shown} is" if len(names) == 1 else f"tensors {shown} are"


def read_json(path: Path, remedy: str = FETCH_AGAIN) -> dict[str, Any]:
    """A JSON object from a file. Raises CheckpointError when missing, broken or not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: is missing; {remedy}") from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path}: is not readable JSON ({error}); {remedy}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds no JSON object; {remedy}")
    return value


def open_safetensors(path: Path) -> dict[str, TensorEntry]:
    """The tensors of one file, after checking that the file is as long as its header says."""
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            header_size = int.from_bytes(stream.read(8), "little")
            if not 2 <= header_size <= min(MAX_HEADER_BYTES, size - 8):
                raise CheckpointError(
                    f"{path}: is truncated or not a safetensors file; {FETCH_AGAIN}"
                )
            header = json.loads(stream.read(header_size))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: is missing; {FETCH_AGAIN}") from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(
            f"{path}: has an unreadable header ({error}); {FETCH_AGAIN}"
        ) from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: has an unreadable header; {FETCH_AGAIN}")
    start = 8 + header_size
    return {
        name: _safetensors_entry(path, name, fields, start, size)
        for name, fields in header.items()
        if name != "__metadata__"
    }


def _safetensors_entry(
    path: Path, name: str, fields: Mapping[str, Any], start: int, file_size: int
) -> TensorEntry:
    try:
        code, shape = str(fields["dtype"]), tuple(int(n) for n in fields["shape"])
        begin, end = (int(n) for n in fields["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path}: tensor {name} has a broken header; {FETCH_AGAIN}"
        ) from error
    dtype = SAFETENSORS_DTYPES.get(code)
    if dtype is None:
        raise CheckpointError(
            f"{path}: tensor {name} is stored as {code}, which is not supported; convert the"
            " weights to bfloat16, float16 or float32"
        )
    if end - begin != math.prod(shape) * dtype.itemsize or begin < 0:
        raise CheckpointError(f"{path}: tensor {name} has a broken header; {FETCH_AGAIN}")
    if start + end > file_size:
        raise CheckpointError(
            f"{path}: is truncated at tensor {name} ({file_size} of at least {start + end} bytes);"
            f" {FETCH_AGAIN}"
        )
    return TensorEntry(name, dtype, shape, path, start + begin, end - begin)


def open_checkpoint(directory: Path) -> Checkpoint:
    """The weights of a model directory: sharded with an index, a single file, or pytorch_model.bin.

    Raises:
      CheckpointError: no weights, a shard missing, a file truncated, an index that does not fit.
    """
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: is not a directory; {FETCH_AGAIN}")
    if (directory / INDEX_FILE).exists():
        return _open_sharded(directory, INDEX_FILE)
    if (directory / SINGLE_FILE).exists():
        return Checkpoint(directory, open_safetensors(directory / SINGLE_FILE))
    found = sorted(directory.glob("*.safetensors"))
    if len(found) == 1:
        return Checkpoint(directory, open_safetensors(found[0]))
    if (directory / PICKLED_INDEX_FILE).exists():
        return _open_sharded(directory, PICKLED_INDEX_FILE)
    if (directory / PICKLED_FILE).exists():
        return Checkpoint(directory, _open_file(directory / PICKLED_FILE))
    what = (
        f"{len(found)} safetensors files without {INDEX_FILE}"
        if found
        else "no safetensors weights"
    )
    raise CheckpointError(f"{directory}: has {what}; {FETCH_AGAIN}")


def _open_file(path: Path) -> dict[str, TensorEntry]:
    if path.suffix != ".bin":
        return open_safetensors(path)
    # Imported here, as that module builds on this one.
    from models.pickled import open_pickled

    return open_pickled(path)


def _open_sharded(directory: Path, index_file: str) -> Checkpoint:
    index = read_json(directory / index_file)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{directory / index_file}: has no weight_map; {FETCH_AGAIN}")
    shards = {
        shard: _open_file(directory / Path(str(shard)).name)
        for shard in sorted(set(weight_map.values()))
    }
    entries: dict[str, TensorEntry] = {}
    for name, shard in weight_map.items():
        if name not in shards[shard]:
            raise CheckpointError(
                f"{directory / str(shard)}: tensor {name} is missing, though the index places it"
                f" there; {FETCH_AGAIN}"
            )
        entries[name] = shards[shard][name]
    return Checkpoint(directory, entries)
