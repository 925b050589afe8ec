"""A head's tensors and the record of what was decided about it, while it is being normalised."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NoReturn

from models.checkpoint import FETCH_AGAIN, TensorEntry
from models.eagle3.description import Choice
from models.eagle3.layouts import Fields
from models.errors import CheckpointError, ModelError


@dataclasses.dataclass(slots=True)
class Notes:
    """Config fields, tensors by canonical name, and the choices made so far."""

    fields: Fields
    tensors: Mapping[str, TensorEntry]
    choices: list[Choice] = dataclasses.field(default_factory=list)

    def note(self, field: str, value: Any, source: str, assumed: bool = False) -> None:
        self.choices.append(Choice(field, str(value), source, assumed))

    def flag(self, field: str, override: bool | None, default: bool, why: str, *names: str) -> bool:
        """A yes/no field: the override, else the config, else `default`, which is then assumed."""
        value, source = self.fields.find(*names)
        if override is not None:
            self.note(field, override, "override")
            return override
        if value is not None:
            self.note(field, bool(value), source)
            return bool(value)
        self.note(field, default, why, assumed=True)
        return default

    def shape(self, name: str, rank: int = 2) -> tuple[int, ...]:
        """Raises CheckpointError when the tensor is missing or of another rank."""
        if name not in self.tensors:
            raise CheckpointError(
                f"{self.fields.where.parent}: tensor {name} is missing; {FETCH_AGAIN}"
            )
        shape = self.tensors[name].shape
        if len(shape) != rank:
            self.misshapen(name, f"rank {rank}")
        return shape

    def misshapen(self, name: str, wanted: str) -> NoReturn:
        entry = self.tensors[name]
        raise CheckpointError(
            f"{entry.file}: tensor {entry.name} has shape {list(entry.shape)}, wanted is {wanted};"
            f" config.json and weights do not belong together: {FETCH_AGAIN}"
        )

    def refuse(self, message: str) -> NoReturn:
        raise ModelError(f"{self.fields.where}: {message}")

    def agree(self, field: str, names: tuple[str, ...], value: int) -> None:
        """Raises ModelError when the config gives another number than the tensors do."""
        given, source = self.fields.find(*names)
        if given is not None and int(given) != value:
            self.refuse(
                f"{source} is {given}, but the tensors have {field} {value}; config.json and"
                f" weights do not belong together: {FETCH_AGAIN}"
            )
