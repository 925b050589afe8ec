"""Tensors of a `pytorch_model.bin`, found without torch and without running anything in the file.

Such a file is a zip archive, stored uncompressed: `data.pkl` describes the tensors, `data/<key>`
holds the bytes of each storage. The pickle is read by an interpreter that knows only the handful of
names which build tensors; any other name is refused before anything is called.
"""

from __future__ import annotations

import collections
import io
import math
import pickle
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from models.checkpoint import TensorEntry
from models.errors import CheckpointError

CONVERT = "convert it to safetensors with a tool you trust"
MAX_PICKLE_BYTES = 64 << 20

_STORAGES: dict[str, np.dtype[Any]] = {
    "DoubleStorage": np.dtype(np.float64),
    "FloatStorage": np.dtype(np.float32),
    "HalfStorage": np.dtype(np.float16),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "LongStorage": np.dtype(np.int64),
    "IntStorage": np.dtype(np.int32),
    "ShortStorage": np.dtype(np.int16),
    "CharStorage": np.dtype(np.int8),
    "ByteStorage": np.dtype(np.uint8),
    "BoolStorage": np.dtype(np.bool_),
}


@dataclass(frozen=True, slots=True)
class _StorageType:
    """Stands for torch.FloatStorage and the like."""

    dtype: np.dtype[Any]


@dataclass(frozen=True, slots=True)
class _Storage:
    dtype: np.dtype[Any]
    key: str
    num_elements: int


@dataclass(frozen=True, slots=True)
class _Tensor:
    """What `_rebuild_tensor_v2` describes; offset and strides in elements."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _rebuild_tensor(storage: Any, offset: Any, shape: Any, strides: Any, *unused: Any) -> _Tensor:
    if not isinstance(storage, _Storage):
        raise pickle.UnpicklingError("a tensor without a storage")
    return _Tensor(storage, int(offset), tuple(map(int, shape)), tuple(map(int, strides)))


def _rebuild_parameter(tensor: Any, *unused: Any) -> Any:
    return tensor


class _TensorUnpickler(pickle.Unpickler):
    """Builds the descriptions above and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _rebuild_tensor
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return _rebuild_parameter
        if module == "torch" and name in _STORAGES:
            return _StorageType(_STORAGES[name])
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is not a tensor")

    def persistent_load(self, pid: Any) -> _Storage:
        match pid:
            case ("storage", _StorageType(dtype=dtype), str(key), _, int(num_elements)):
                return _Storage(dtype, key, num_elements)
        raise pickle.UnpicklingError("an unknown kind of storage")


def open_pickled(path: Path) -> dict[str, TensorEntry]:
    """Name -> place of every tensor in the file; a training checkpoint's other values are refused.

    Raises CheckpointError: not a torch zip file, truncated, compressed, or a pickle that asks for
    anything but tensors.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = {info.filename: info for info in archive.infolist()}
            pickles = [name for name in members if name.endswith("/data.pkl") or name == "data.pkl"]
            if len(pickles) != 1 or members[pickles[0]].file_size > MAX_PICKLE_BYTES:
                raise CheckpointError(f"{path}: is not a file written by torch.save; {CONVERT}")
            state = _TensorUnpickler(io.BytesIO(archive.read(pickles[0]))).load()
        if not isinstance(state, Mapping):
            raise CheckpointError(
                f"{path}: holds {type(state).__name__}, not tensors by name; {CONVERT}"
            )
        root = pickles[0].removesuffix("data.pkl")
        with path.open("rb") as stream:
            return {
                str(name): _entry(path, stream, root, members, str(name), value)
                for name, value in state.items()
                if name != "_metadata"
            }
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: is missing") from error
    except zipfile.BadZipFile as error:
        raise CheckpointError(
            f"{path}: is truncated, or written by torch before 1.6 ({error}); download it again, or"
            f" {CONVERT}"
        ) from error
    except (
        pickle.UnpicklingError,
        AttributeError,
        EOFError,
        IndexError,
        OverflowError,
        TypeError,
        ValueError,
        KeyError,
    ) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}: is not loaded, because {error}; {CONVERT}") from error


def _entry(
    path: Path,
    stream: io.BufferedReader,
    root: str,
    members: Mapping[str, zipfile.ZipInfo],
    name: str,
    value: Any,
) -> TensorEntry:
    """Where the tensor's bytes lie: in its storage's member, from the tensor's offset on."""
    if not isinstance(value, _Tensor):
        raise CheckpointError(f"{path}: {name} is {type(value).__name__}, not a tensor; {CONVERT}")
    info = members.get(f"{root}data/{value.storage.key}")
    item = value.storage.dtype.itemsize
    if info is None or info.compress_type != zipfile.ZIP_STORED:
        raise CheckpointError(
            f"{path}: the bytes of tensor {name} are missing or compressed; {CONVERT}"
        )
    reach = sum((n - 1) * step for n, step in zip(value.shape, value.strides, strict=True))
    num_elements = reach + 1 if math.prod(value.shape) else 0
    if (
        min((value.offset, *value.shape, *value.strides)) < 0
        or (value.offset + num_elements) * item > info.file_size
        or math.prod(value.shape) * item > info.file_size  # a few bytes repeated to fill memory
    ):
        raise CheckpointError(
            f"{path}: tensor {name} reaches beyond its storage; download it again"
        )
    stream.seek(info.header_offset + 26)  # the local header's lengths of name and extra field
    lengths = stream.read(4)
    skipped = int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
    start = info.header_offset + 30 + skipped + value.offset * item
    usual = _row_major(value.shape)
    strides = None if value.strides == usual or math.prod(value.shape) <= 1 else value.strides
    if strides is None:
        num_elements = math.prod(value.shape)
    return TensorEntry(
        name, value.storage.dtype, value.shape, path, start, num_elements * item, strides
    )


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))
