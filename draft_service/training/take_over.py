"""Training that goes on from a head on disk instead of the target's last layer.

The head's weights, lm_head and draft vocabulary are taken over. Its shape must be the recipe's, but
for layers: more of them go on top and start as the identity (`warm_start.initial_params`).
Source of the inverse mapping: `export.served_params`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from common.types import Int32Array
from draft_service.training.dataset import DraftVocabulary
from draft_service.training.export import ATTENTION, MLP, layer_norms, served_config
from draft_service.training.loss import Frozen
from draft_service.training.network import HeadShape
from draft_service.training.network import Params as TrainedParams
from models.config import TargetConfig
from models.eagle3 import HeadConfig, HeadOverrides, TableSource, load_head
from models.layers import Params

NOT_COMPARED = ("layout", "lm_head_source", "dtype", "provenance")
"""Fields of a description that make no difference to how the head computes."""

REMEDIES = {
    "embedding_layers": "set head.num_layers and head.fusion to the head's",
    "windows": "set head.num_layers to the head's",
    "draft_vocab_size": "set head.draft_vocab_size to the head's",
    "mlp_size": "set head.intermediate_size to the head's",
    "boundaries": "set head.boundaries to the head's",
}
"""What to do about a field that a recipe decides; any other one is outside what can be trained."""


@dataclass(frozen=True)
class GivenHead:
    """A head as `models.eagle3` loads it, float32. `directory` is for messages."""

    directory: Path
    config: HeadConfig
    params: Params

    @staticmethod
    def load(directory: Path, target: Path, boundaries: tuple[int, ...]) -> GivenHead:
        """`boundaries`: what the recipe captures, for heads whose files do not say. ModelError."""
        if not (directory / "config.json").exists():
            raise ValueError(f"head.init_from: {directory} holds no head (no config.json)")
        config, params = load_head(directory, target)
        if any(choice.field == "boundaries" and choice.assumed for choice in config.provenance):
            overrides = HeadOverrides(boundaries=boundaries)
            config, params = load_head(directory, target, overrides=overrides)
        return GivenHead(directory, config, params)

    def vocabulary(self, responses: Iterable[Int32Array]) -> DraftVocabulary:
        """The head's own draft vocabulary, ascending, and what it covers of `responses`."""
        ids = np.asarray(self.params["draft_to_target"], np.int32)[self._order]
        vocabulary = DraftVocabulary(ids, self.config.target_vocab_size, 0.0)
        return dataclasses.replace(vocabulary, coverage=vocabulary.share_of(responses))

    def check(self, shape: HeadShape, target: TargetConfig, draft_vocab_size: int) -> None:
        """Raises ValueError naming the first field in which the head is not what is trained.

        Layers that the recipe has beyond the head's are no difference.
        """
        own_layers = min(shape.num_layers, self.config.num_layers)
        shape = dataclasses.replace(shape, num_layers=own_layers)
        ids = np.zeros(draft_vocab_size, np.int32)
        own_size = DraftVocabulary(ids, target.vocab_size, 0.0)
        wanted = served_config(shape, own_size, target)
        for field in dataclasses.fields(HeadConfig):
            if field.name in NOT_COMPARED:
                continue
            found, needed = getattr(self.config, field.name), getattr(wanted, field.name)
            if found != needed:
                remedy = REMEDIES.get(field.name, "heads of that kind can be served, not trained")
                raise ValueError(
                    f"head.init_from: {self.directory} has {field.name} = {_plain(found)}, this"
                    f" recipe trains {_plain(needed)}; {remedy}"
                )

    def frozen(self, tables: Frozen) -> Frozen:
        """`tables` with the head's own lm_head, which is what its logits are made with."""
        rows = np.asarray(self.params["lm_head"])[self._order]
        return tables._replace(lm_head=jnp.asarray(rows.T))

    @property
    def _order(self) -> Int32Array:
        """Draft ids by ascending target id: what is exported must ascend."""
        return np.argsort(np.asarray(self.params["draft_to_target"])).astype(np.int32)

    def initial_params(
        self, fresh: TrainedParams, shape: HeadShape, frozen: Frozen
    ) -> TrainedParams:
        """The head in training form; the scale of features is taken out of fc again.

        Layers beyond the head's are those of `fresh`, a head that starts from the target.
        """
        own_layers = self.config.num_layers
        scale = np.asarray(frozen.feature_scale)[:, None]
        layers = [
            _trained_layer(self.params[f"layer_{i}"], shape.takes_embedding(i))
            for i in range(own_layers)
        ]
        return {
            "fc": jnp.asarray(np.asarray(self.params["fuse"]["fc"]["kernel"]) / scale),
            "norm": _copy(self.params["final_norm"]["scale"]),
            "layers": [*layers, *fresh["layers"][own_layers:]],
        }


def _trained_layer(served: Params, takes_embedding: bool) -> TrainedParams:
    norms = layer_norms(takes_embedding)
    return {
        **{name: _copy(served[ours]["scale"]) for ours, name in norms.items()},
        **{name: _copy(served["attention"][ours]["kernel"]) for ours, name in ATTENTION.items()},
        **{name: _copy(served["mlp"][ours]["kernel"]) for ours, name in MLP.items()},
    }


def _copy(array: jax.Array) -> jax.Array:
    """An array of its own: training donates its parameters."""
    return jnp.array(array, jnp.float32, copy=True)


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, TableSource) else value
