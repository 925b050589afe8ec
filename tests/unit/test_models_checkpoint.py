"""Weight files: what is read, and the one line that each broken one gives."""

from __future__ import annotations

import json
import os
import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from model_files import GOLDENS, write_model

from models.checkpoint import open_checkpoint, read_json
from models.errors import CheckpointError
from models.pickled import open_pickled
from models.writing import LazyTensor, write_safetensors

WEIGHTS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.arange(4, dtype=np.float16),
    "c": np.arange(5).astype(ml_dtypes.bfloat16),
    "d": np.array([True, False]),
    "e": np.array([-7, 2**40], np.int64),
}


@pytest.mark.parametrize("shards", [1, 3])
def test_every_dtype_survives_writing_and_reading(tmp_path: Path, shards: int) -> None:
    checkpoint = open_checkpoint(write_model(tmp_path, {}, WEIGHTS, shards))
    assert checkpoint.names == sorted(WEIGHTS)
    for name, value in WEIGHTS.items():
        read = checkpoint.read(name, value.shape)
        assert read.dtype == value.dtype
        np.testing.assert_array_equal(read, value)


def test_the_safetensors_package_reads_what_is_written(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    plain = {name: WEIGHTS[name] for name in "abde"}
    write_model(tmp_path, {}, plain)
    loaded = load_file(tmp_path / "model.safetensors")
    for name, value in plain.items():
        np.testing.assert_array_equal(loaded[name], value)


def test_interrupted_writing_leaves_no_file(tmp_path: Path) -> None:
    def fail() -> Any:
        raise OSError("disk full")

    tensors = {"a": LazyTensor(np.dtype(np.float32), (2,), fail)}
    with pytest.raises(OSError, match="disk full"):
        write_safetensors(tmp_path / "model.safetensors", tensors)
    assert not (tmp_path / "model.safetensors").exists()


def test_tensor_other_than_announced_is_refused(tmp_path: Path) -> None:
    tensors = {"a": LazyTensor(np.dtype(np.float32), (2,), lambda: np.zeros(3, np.float32))}
    with pytest.raises(ValueError, match="a: made float32"):
        write_safetensors(tmp_path / "model.safetensors", tensors)


def test_truncated_file_names_a_tensor_and_the_remedy(tmp_path: Path) -> None:
    write_model(tmp_path, {}, WEIGHTS)
    path = tmp_path / "model.safetensors"
    os.truncate(path, path.stat().st_size - 3)
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors: is truncated at tensor e .*download"
    ):
        open_checkpoint(tmp_path)


def test_file_shortened_after_opening_is_noticed(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_model(tmp_path, {}, {"a": np.zeros(64, np.float32)}))
    path = tmp_path / "model.safetensors"
    os.truncate(path, path.stat().st_size - 8)
    with pytest.raises(CheckpointError, match=r"tensor a is truncated \(248 of 256 bytes\)"):
        checkpoint.read("a")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is truncated or not a safetensors file"),
        (b"\xff" * 64, "is truncated or not a safetensors file"),
        ((5).to_bytes(8, "little") + b"{'a':" + b" " * 9, "has an unreadable header"),
        ((2).to_bytes(8, "little") + b"[]", "has an unreadable header"),
    ],
)
def test_garbage_is_not_read_as_weights(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dtype": "F8_E4M3", "shape": [1], "data_offsets": [0, 1]}, "x is stored as F8_E4M3"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, "x has a broken header"),
        ({"dtype": "F32", "shape": [2]}, "x has a broken header"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}, "x has a broken header"),
    ],
)
def test_broken_header_names_the_tensor(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    header = json.dumps({"x": fields}).encode()
    content = len(header).to_bytes(8, "little") + header + b"\0" * 8
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    write_model(tmp_path, {}, WEIGHTS, shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.safetensors: is missing"):
        open_checkpoint(tmp_path)


def test_index_that_promises_too_much_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path, {}, WEIGHTS, shards=2)
    index = read_json(tmp_path / "model.safetensors.index.json")
    index["weight_map"]["f"] = index["weight_map"]["a"]
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="tensor f is missing, though the index"):
        open_checkpoint(tmp_path)


def test_shard_names_cannot_leave_the_directory(tmp_path: Path) -> None:
    outside = write_model(tmp_path / "outside", {}, WEIGHTS)
    inside = tmp_path / "inside"
    inside.mkdir()
    index = {"weight_map": {"a": f"../{outside.name}/model.safetensors"}}
    (inside / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"inside/model\.safetensors: is missing"):
        open_checkpoint(inside)


def test_misshapen_missing_and_unexpected_tensors_are_named(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_model(tmp_path, {}, WEIGHTS))
    with pytest.raises(CheckpointError, match=r"tensor a has shape \[2, 3\].*asks for \[3, 2\]"):
        checkpoint.read("a", (3, 2))
    with pytest.raises(CheckpointError, match="tensors y, z are missing"):
        checkpoint.check_names([*WEIGHTS, "y", "z"])
    with pytest.raises(CheckpointError, match="tensor e is not part of the model"):
        checkpoint.check_names(["a", "b", "c"], allowed=["d"])


def test_directory_without_weights_says_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no safetensors weights"):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="is not a directory"):
        open_checkpoint(tmp_path / "nowhere")


@pytest.mark.parametrize("text", ["", "{", "[1]", "\x00"])
def test_broken_json_names_the_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json: "):
        read_json(tmp_path / "config.json")


# pytorch_model.bin


def test_torch_file_is_read_without_torch() -> None:
    entries = open_pickled(GOLDENS / "pickled.bin")
    with np.load(GOLDENS / "pickled.npz") as expected:
        assert set(entries) == set(expected.files)
        for name in expected.files:
            value = entries[name].read().astype(np.float32)
            np.testing.assert_array_equal(value, expected[name])
    assert entries["long"].dtype == np.int64
    assert entries["bfloat16"].dtype == ml_dtypes.bfloat16


def test_torch_file_serves_as_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes((GOLDENS / "pickled.bin").read_bytes())
    assert open_checkpoint(tmp_path).read("half").shape == (4, 3)


class Payload:
    """Pickles into a call of os.system."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


def write_zip(path: Path, pickled: bytes, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        for name, content in members.items():
            archive.writestr(f"archive/data/{name}", content)
    return path


def test_pickle_that_runs_code_is_refused_unrun(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    path = write_zip(tmp_path / "pytorch_model.bin", pickle.dumps({"a": Payload(marker)}, 2))
    with pytest.raises(CheckpointError, match=r"it asks for posix\.system.*safetensors"):
        open_pickled(path)
    assert not marker.exists()


@pytest.mark.parametrize(
    "name", ["builtins eval", "builtins getattr", "torch load", "numpy loads", "os system"]
)
def test_every_other_global_is_refused(tmp_path: Path, name: str) -> None:
    module, attribute = name.split()
    pickled = b"\x80\x02c" + f"{module}\n{attribute}\n".encode() + b"."
    path = write_zip(tmp_path / "x.bin", pickled)
    with pytest.raises(CheckpointError, match=re.escape(f"it asks for {module}.{attribute}")):
        open_pickled(path)


def tensor_pickle(shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> bytes:
    """{"t": tensor over float32 storage "0" of 4 elements}, opcode by opcode."""

    def numbers(values: tuple[int, ...]) -> bytes:
        return b"(" + b"".join(f"I{v}\n".encode() for v in values) + b"t"

    storage = b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpuI4\ntQ"
    arguments = b"(" + storage + f"I{offset}\n".encode() + numbers(shape) + numbers(strides) + b"t"
    return b"\x80\x02}X\x01\0\0\0tctorch._utils\n_rebuild_tensor_v2\n" + arguments + b"Rs."


def test_hand_made_tensor_is_read(tmp_path: Path) -> None:
    data = np.arange(4, dtype=np.float32).tobytes()
    path = write_zip(tmp_path / "x.bin", tensor_pickle((2,), (2,), 1), **{"0": data})
    np.testing.assert_array_equal(open_pickled(path)["t"].read(), [1.0, 3.0])


@pytest.mark.parametrize(
    ("shape", "strides", "offset"),
    [((5,), (1,), 0), ((2,), (1,), 3), ((2, 2), (3, 1), 0), ((10**12,), (0,), 0), ((2,), (-1,), 1)],
)
def test_tensor_reaching_beyond_its_storage_is_refused(
    tmp_path: Path, shape: tuple[int, ...], strides: tuple[int, ...], offset: int
) -> None:
    data = np.arange(4, dtype=np.float32).tobytes()
    path = write_zip(tmp_path / "x.bin", tensor_pickle(shape, strides, offset), **{"0": data})
    with pytest.raises(CheckpointError, match="tensor t reaches beyond its storage"):
        open_pickled(path)


def test_missing_storage_is_named(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "x.bin", tensor_pickle((2,), (1,), 0))
    with pytest.raises(CheckpointError, match="the bytes of tensor t are missing"):
        open_pickled(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (pickle.dumps({"a": 1}), "truncated, or written by torch before 1.6"),
        ((GOLDENS / "pickled.bin").read_bytes()[:900], "truncated, or written by torch"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "x.bin").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        open_pickled(tmp_path / "x.bin")


@pytest.mark.parametrize("value", [[1, 2], {"epoch": 3}, {"optimizer": {"lr": 1.0}}])
def test_training_states_are_refused(tmp_path: Path, value: Any) -> None:
    path = write_zip(tmp_path / "x.bin", pickle.dumps(value, 2))
    with pytest.raises(CheckpointError, match=r"not tensors by name|not a tensor"):
        open_pickled(path)
