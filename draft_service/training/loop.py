"""The training loop: AdamW steps, checkpoints that resume exactly, progress, validation.

OUTPUT/checkpoint.npz   params, optimiser state, scale of features, step, seconds; replaced
                        atomically
OUTPUT/log.jsonl        one JSON object per report
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from draft_service.training.dataset import BatchPlan, Sample, plan_batches
from draft_service.training.features import FeatureCache
from draft_service.training.loss import Batch, Frozen, StepMetrics, batch_loss, chain_hits
from draft_service.training.network import HeadShape, Params
from draft_service.training.recipe import OptimiserRecipe, Recipe

DEVICES = "devices"
"""The mesh axis that a batch's sequences are split over; on the CPU, one device per core."""

Indices = npt.NDArray[np.int32]
Report = Callable[[dict[str, Any]], None]


@dataclass
class TrainState:
    """What a checkpoint holds; the only thing that changes in a run."""

    params: Params
    optimiser: Any
    step: int = 0  # optimiser steps done
    seconds: float = 0.0  # of training, validation excluded


def make_optimiser(recipe: OptimiserRecipe) -> optax.GradientTransformation:
    """AdamW without its learning rate, which the loop multiplies in (it may depend on time)."""
    return optax.chain(
        optax.clip_by_global_norm(recipe.clip),
        optax.scale_by_adam(b1=0.9, b2=0.95),
        optax.add_decayed_weights(recipe.weight_decay),
    )


def learning_rate(recipe: OptimiserRecipe, step: int, seconds: float) -> float:
    """Linear warm-up, then a cosine over the rest of the run down to `final_fraction`."""
    warm = min(1.0, (step + 1) / max(1, recipe.warmup_steps))
    progress = _progress(recipe, step, seconds)
    start = recipe.warmup_steps / recipe.total_steps
    phase = min(1.0, max(0.0, (progress - start) / (1.0 - start)))
    floor = recipe.final_fraction
    cosine = floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * phase))
    return recipe.learning_rate * warm * cosine


def _progress(recipe: OptimiserRecipe, step: int, seconds: float) -> float:
    share = step / recipe.total_steps
    return share if recipe.max_minutes is None else max(share, seconds / (60 * recipe.max_minutes))


class Trainer:
    """Runs a recipe on cached features. Build it, `resume()`, then `run()`."""

    def __init__(
        self,
        recipe: Recipe,
        shape: HeadShape,
        frozen: Frozen,
        params: Params,
        samples: list[Sample],
        cache: FeatureCache,
        training: Indices,
        validation: Indices,
    ) -> None:
        self.recipe, self.shape, self.frozen = recipe, shape, frozen
        self.samples, self.cache = samples, cache
        self.training, self.validation = training, validation
        optimiser = make_optimiser(recipe.optimiser)
        self.state = TrainState(params, optimiser.init(params))
        self.mesh = jax.make_mesh((jax.device_count(),), (DEVICES,))
        self._split = NamedSharding(self.mesh, _spec(DEVICES))
        self._step = _compile_step(shape, optimiser, recipe.optimiser, self.mesh)
        self._hits = jax.jit(partial(chain_hits, shape, num_steps=recipe.validation_steps))
        unroll = recipe.optimiser
        loss = partial(
            batch_loss, shape, num_steps=unroll.num_test_steps, step_decay=unroll.step_decay
        )
        self._held_out = jax.jit(lambda *arguments: loss(*arguments)[1])

    @property
    def checkpoint_path(self) -> Path:
        return self.recipe.output / "checkpoint.npz"

    def resume(self) -> bool:
        """Takes up the checkpoint in the output directory; False where there is none."""
        if not self.checkpoint_path.exists():
            return False
        with np.load(self.checkpoint_path) as saved:
            example = (self.state.params, self.state.optimiser)
            leaves, structure = jax.tree.flatten(example)
            loaded = [saved[f"leaf_{i}"] for i in range(len(leaves))]
            for index, (old, new) in enumerate(zip(leaves, loaded, strict=True)):
                if old.shape != new.shape:
                    raise ValueError(
                        f"{self.checkpoint_path}: tensor {index} has shape {new.shape}, this recipe"
                        f" needs {old.shape}; choose another output or delete the checkpoint"
                    )
            params, optimiser = jax.tree.unflatten(structure, [jnp.asarray(x) for x in loaded])
            # fc was trained on features of this scale; more captured sequences would change it
            scale = jnp.asarray(saved["feature_scale"])
            self.frozen = self.frozen._replace(feature_scale=scale)
            self.state = TrainState(params, optimiser, int(saved["step"]), float(saved["seconds"]))
        return True

    def save(self) -> None:
        leaves = jax.tree.leaves((self.state.params, self.state.optimiser))
        arrays = {f"leaf_{i}": np.asarray(leaf) for i, leaf in enumerate(leaves)}
        self.recipe.output.mkdir(parents=True, exist_ok=True)
        partial_path = self.checkpoint_path.with_name("checkpoint.partial.npz")
        arrays["feature_scale"] = np.asarray(self.frozen.feature_scale)
        arrays["step"], arrays["seconds"] = np.array(self.state.step), np.array(self.state.seconds)
        np.savez(partial_path, allow_pickle=False, **arrays)
        partial_path.replace(self.checkpoint_path)

    def finished(self) -> bool:
        return _progress(self.recipe.optimiser, self.state.step, self.state.seconds) >= 1.0

    def run(self, report: Report, max_steps: int | None = None) -> None:
        """Trains until the schedule ends, or `max_steps` more steps; saves at the end."""
        recipe, stop = self.recipe, None if max_steps is None else self.state.step + max_steps
        window: list[StepMetrics] = []
        for plan in self._plans(self.state.step):
            if self.finished() or self.state.step == stop:
                break
            window.append(self._one_step(plan))
            step = self.state.step
            if step % recipe.log_every_steps == 0:
                report(self._progress_report(window))
                window = []
            if step % recipe.checkpoint_every_steps == 0:
                self.save()
            if step % recipe.validate_every_steps == 0:
                report({"step": step, **self.validate()})
        self.save()
        report({"step": self.state.step, "finished": self.finished(), **self.validate()})

    def _one_step(self, plan: BatchPlan) -> StepMetrics:
        started = time.monotonic()
        batch = self.cache.batch(plan, self.recipe.optimiser.num_test_steps)
        batch = jax.device_put(batch, self._split)
        state = self.state
        rate = learning_rate(self.recipe.optimiser, state.step, state.seconds)
        state.params, state.optimiser, metrics = self._step(
            state.params, state.optimiser, self.frozen, batch, jnp.float32(rate)
        )
        host: StepMetrics = jax.device_get(metrics)
        state.step += 1
        state.seconds += time.monotonic() - started
        return host

    def _plans(self, step: int) -> Iterator[BatchPlan]:
        """Batches from `step` on; epoch e is shuffled by seed + e, so a resumed run sees the
        same."""
        epoch = 0
        while True:
            seed = self.recipe.optimiser.seed + epoch
            plans = self._plan_batches(self.training, seed)
            yield from plans[step:]
            step = max(0, step - len(plans))
            epoch += 1

    def _plan_batches(self, indices: Indices, seed: int) -> list[BatchPlan]:
        return plan_batches(
            self.samples, indices, self.recipe.data, seed, rows_multiple=self.mesh.size
        )

    def _progress_report(self, window: list[StepMetrics]) -> dict[str, Any]:
        means, num_rows = _means(window)
        optimiser = self.recipe.optimiser
        return {
            "step": self.state.step,
            "total_steps": optimiser.total_steps,
            "seconds": round(self.state.seconds, 1),
            "tokens_per_second": round(
                num_rows * self.state.step / len(window) / self.state.seconds
            ),
            "learning_rate": learning_rate(optimiser, self.state.step, self.state.seconds),
            **means,
        }

    def validate(self) -> dict[str, Any]:
        """Of held-out sequences: loss and accuracy per step as in training, and greedy chains by
        the responses' temperature: acceptance length and accuracy per step."""
        plans = self._plan_batches(self.validation, seed=0)
        groups: dict[str, list[tuple[Any, Any]]] = {}
        window: list[StepMetrics] = []
        for plan in plans:
            taught = self.cache.batch(plan, self.recipe.optimiser.num_test_steps)
            window.append(jax.device_get(self._held_out(self.state.params, self.frozen, taught)))
            batch: Batch = self.cache.batch(plan, self.recipe.validation_steps)
            hits, present = jax.device_get(self._hits(self.state.params, self.frozen, batch))
            for row, index in enumerate(plan.indices):
                name = "greedy" if self.samples[index].temperature == 0 else "sampled"
                groups.setdefault(name, []).append((hits[row], present[row]))
        chains = {name: summarise_chains(group) for name, group in sorted(groups.items())}
        return {"validation": {**_means(window)[0], **chains}}


def _means(window: list[StepMetrics]) -> tuple[dict[str, list[float]], float]:
    """Loss and accuracy per step over a window of batches, and the rows of the first step."""
    total = jax.tree.map(lambda *values: np.sum(values, axis=0), *window)
    rows = np.maximum(total.rows, 1)
    means = {
        "loss": [round(float(x), 4) for x in total.loss / rows],
        "accuracy": [round(float(x), 4) for x in total.correct / rows],
    }
    return means, float(total.rows[0])


def summarise_chains(sequences: list[tuple[Any, Any]]) -> dict[str, Any]:
    """Of (hits, present) bool [R, K] per sequence: greedy chain verification as it would go.

    A round starts at an anchor, accepts its leading hits and moves on by them and the bonus.
    `conditional`: share of hits at depth k among rounds that got there and had a token to predict.
    """
    depth = sequences[0][0].shape[1]
    rounds = emitted = 0
    reached, hit_at = np.zeros(depth, np.int64), np.zeros(depth, np.int64)
    for hits, present in sequences:
        anchor = 1  # row 0 is the last prompt token's pair; drafting starts with a response token
        while anchor < hits.shape[0] and present[anchor, 0]:
            accepted = 0
            while accepted < depth and present[anchor, accepted]:
                reached[accepted] += 1
                if not hits[anchor, accepted]:
                    break
                hit_at[accepted] += 1
                accepted += 1
            if (
                accepted == depth or present[anchor, accepted]
            ):  # a round cut off by the end is not one
                rounds += 1
                emitted += accepted + 1
            anchor += accepted + 1
    return {
        "sequences": len(sequences),
        "rounds": rounds,
        "acceptance_length": round(emitted / max(rounds, 1), 4),
        "conditional": [round(float(x), 4) for x in hit_at / np.maximum(reached, 1)],
    }


def _spec(*axes: str) -> PartitionSpec:
    return PartitionSpec(*axes)  # type: ignore[no-untyped-call]


def _compile_step(
    shape: HeadShape, optimiser: optax.GradientTransformation, recipe: OptimiserRecipe, mesh: Mesh
) -> Callable[..., tuple[Params, Any, StepMetrics]]:
    """(params, optimiser state, frozen, batch, rate) → new ones; the first two are donated."""
    loss = partial(
        batch_loss,
        shape,
        num_steps=recipe.num_test_steps,
        step_decay=recipe.step_decay,
        axis=DEVICES,
    )

    def gradients(params: Params, frozen: Frozen, batch: Batch) -> tuple[Params, StepMetrics]:
        own: tuple[Params, StepMetrics] = jax.grad(loss, has_aux=True)(params, frozen, batch)
        summed: tuple[Params, StepMetrics] = jax.lax.psum(own, DEVICES)  # type: ignore[no-untyped-call]
        return summed

    split = jax.shard_map(
        gradients,
        mesh=mesh,
        in_specs=(_spec(), _spec(), _spec(DEVICES)),
        out_specs=_spec(),
        check_vma=False,  # custom gradients inside carry no replication types
    )

    def step(
        params: Params, opt_state: Any, frozen: Frozen, batch: Batch, rate: jax.Array
    ) -> tuple[Params, Any, StepMetrics]:
        grads, metrics = split(params, frozen, batch)
        with jax.numpy_dtype_promotion("standard"):  # optax divides by its int32 step count
            updates, opt_state = optimiser.update(grads, opt_state, params)
        params = jax.tree.map(lambda p, u: p - rate * u, params, updates)
        return params, opt_state, metrics

    return jax.jit(step, donate_argnums=(0, 1))


def write_log(path: Path) -> Report:
    """A reporter that appends JSON lines to `path` and prints them."""
    path.parent.mkdir(parents=True, exist_ok=True)

    def report(entry: dict[str, Any]) -> None:
        line = json.dumps(entry)
        with path.open("a") as log:
            log.write(line + "\n")
        print(line, flush=True)

    return report
