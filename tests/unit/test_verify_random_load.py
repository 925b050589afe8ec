"""A warm engine under random load: nothing is compiled, nothing leaks, and every step is one
transfer up and one down, beside features and what few ask for."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
import pytest
from jax import monitoring

from common.types import DraftTree, SamplingParams
from models.config import RopeConfig, TargetConfig
from models.target import init_target
from verify_service.commands import Close, Command, Open, Rollback, VerifyTree
from verify_service.engine import DeviceEngine, EngineConfig
from verify_service.events import Preempted, RoundDone
from verify_service.limits import VerifyLimits
from verify_service.machine import VerifyMachine

TARGET = TargetConfig(
    family="llama", vocab_size=61, hidden_size=16, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=4, mlp_size=24, norm_eps=1e-5, rope=RopeConfig(theta=10_000.0),
    tied_embeddings=False, max_positions=128, windows=(None, 36), boundaries=(1, 2),
)  # fmt: skip
CONFIG = EngineConfig(
    num_pages=20, page_size=4, max_sequences=4, max_context_len=48, max_tree_nodes=8, max_depth=4,
    row_buckets=(8,), max_rows=32, max_stop_tokens=4,
)  # fmt: skip
LIMITS = VerifyLimits(
    vocab_size=61, max_context_len=48, max_tree_nodes=8, max_tree_depth=4, max_sequences=4,
    max_waiting_sequences=4, page_size=4, num_pages=20, max_step_tokens=32, max_prefill_tokens=12,
    max_stop_tokens=4, feature_window_tokens=64,
)  # fmt: skip
COMPILE = "/jax/core/compile/backend_compile_duration"


@contextmanager
def counted_compiles() -> Iterator[list[float]]:
    """Seconds of every compilation by anybody in this process."""
    seconds: list[float] = []

    def listen(event: str, duration: float, **_: Any) -> None:
        if event == COMPILE:
            seconds.append(duration)

    monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seconds
    finally:
        monitoring.unregister_event_duration_listener(listen)


class Load:
    """A router that asks for anything."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.tokens: dict[bytes, list[int]] = {}
        self.rounds: dict[bytes, int] = {}
        self.epochs: dict[bytes, int] = {}
        self.limits: dict[bytes, int] = {}
        self.num_opened = 0

    def open(self) -> Command:
        chance = self.random
        name = self.num_opened.to_bytes(16, "big")
        self.num_opened += 1
        length = chance.randint(1, 30)
        common = [7 * i % 61 for i in range(length)]
        own = [chance.randrange(61) for _ in range(length)]
        tokens = common if chance.random() < 0.6 else own
        self.tokens[name], self.rounds[name], self.epochs[name] = list(tokens), 0, 1
        self.limits[name] = chance.randint(length + 1, 48)
        return Open(
            sequence_id=name, epoch=1, tokens=tuple(tokens), num_prompt_tokens=length,
            sampling=self.sampling(), max_total_tokens=self.limits[name],
            stop_tokens=(3, 4), wants_features=chance.random() < 0.7,
            cache_salt=chance.choice([b"", b"a"]),
        )  # fmt: skip

    def sampling(self) -> SamplingParams:
        chance = self.random

        def maybe(value: Any, otherwise: Any) -> Any:
            return value if chance.random() < 0.4 else otherwise

        logprobs = chance.random() < 0.5
        return SamplingParams(
            temperature=maybe(chance.uniform(0, 2), 0.0), top_k=maybe(chance.randint(1, 70), 0),
            top_p=maybe(chance.uniform(0.1, 1), 1.0), min_p=maybe(chance.uniform(0, 0.5), 0.0),
            seed=chance.getrandbits(64), ignore_eos=chance.random() < 0.5,
            presence_penalty=maybe(chance.uniform(-2, 2), 0.0),
            frequency_penalty=maybe(chance.uniform(-2, 2), 0.0),
            repetition_penalty=maybe(chance.uniform(0.5, 2), 1.0),
            logit_bias=maybe(((5, 3.0), (60, -9.0)), ()), min_tokens=maybe(6, 0),
            logprobs=logprobs, top_logprobs=chance.randint(0, 20) if logprobs else 0,
            prompt_logprobs=maybe(chance.randint(0, 20), None),
        )  # fmt: skip

    def follow(self, event: RoundDone) -> Command:
        """The next round, a rollback, or the end."""
        name, chance = event.sequence_id, self.random
        tokens = self.tokens[name]
        tokens += event.result.tokens
        self.rounds[name] += 1
        if len(tokens) >= self.limits[name] or chance.random() < 0.08:
            del self.tokens[name]
            return Close(sequence_id=name, epoch=self.epochs[name])
        if chance.random() < 0.08:
            del tokens[chance.randint(1, len(tokens)) :]
            self.epochs[name] += 1
            return Rollback(
                sequence_id=name, epoch=self.epochs[name], committed_len=len(tokens),
                round=self.rounds[name],
            )  # fmt: skip
        return self.tree(name)

    def tree(self, name: bytes) -> Command:
        tokens, size = self.tokens[name], self.random.choice([1, 1, 3, 8])
        nodes = [tokens[-1], *(self.random.randrange(61) for _ in range(size - 1))]
        parents = [-1, *(self.random.randrange(i + 1) for i in range(size - 1))]
        return VerifyTree(
            sequence_id=name, epoch=self.epochs[name], acked_round=self.rounds[name] - 1,
            round=self.rounds[name], kv_len=len(tokens) - 1,
            tree=DraftTree(
                np.array(nodes, np.int32), np.array(parents, np.int32),
                -np.arange(size, dtype=np.float32),
            ),
        )  # fmt: skip


@pytest.fixture(scope="module")
def engine() -> DeviceEngine:
    engine = DeviceEngine(TARGET, init_target(TARGET, 5), CONFIG)
    engine.warm_up()
    return engine


@pytest.mark.parametrize("seed", [1, 2])
def test_no_load_compiles_or_leaks(engine: DeviceEngine, seed: int) -> None:
    machine, load = VerifyMachine(LIMITS), Load(seed)
    machine.connect(1)
    num_steps = num_preempted = 0
    with counted_compiles() as compiles:
        while load.num_opened < 60 or load.tokens:
            commands = []
            if load.num_opened < 60 and len(load.tokens) < 7:
                commands.append(load.open())
            events = machine.handle(1, commands, float(num_steps))
            plan = machine.plan(float(num_steps))
            num_steps += 1
            assert num_steps < 3000
            events += plan.events
            events += machine.retire(plan.works, engine.run(plan.works), float(num_steps))
            num_preempted += sum(isinstance(event, Preempted) for event in events)
            for event in events:
                if isinstance(event, RoundDone):
                    followed = load.follow(event)
                    machine.handle(1, [followed], float(num_steps))
                    if isinstance(followed, Rollback):
                        again = load.tree(event.sequence_id)
                        machine.handle(1, [again], float(num_steps))
            while machine.next_features(1, 1 << 20) is not None:
                pass
            machine.check_balance()
    assert compiles == []
    assert engine.compiles_after_warm_up == 0
    assert num_preempted > 0
    assert machine.prefix_counts.found > 40
    assert machine.num_sequences == 0
    assert machine.page_counts.available == LIMITS.num_pages


class Watched:
    """An array on the device that notes when it is fetched."""

    def __init__(self, name: str, array: jax.Array, fetched: list[str]) -> None:
        self._name, self._array, self._fetched = name, array, fetched

    def copy_to_host_async(self) -> None:
        self._array.copy_to_host_async()

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        self._fetched.append(self._name)
        return np.asarray(self._array)


@pytest.mark.parametrize(
    ("sampling", "features", "wanted"),
    [
        (SamplingParams(temperature=0.9, top_k=5, logprobs=True), False, {"small"}),
        (SamplingParams(frequency_penalty=0.5), True, {"small", "features"}),
        (SamplingParams(logprobs=True, top_logprobs=2), False, {"small", "top"}),
    ],
)
def test_a_step_is_one_transfer_up_and_one_down_and_gives_its_buffers_up(
    engine: DeviceEngine,
    sampling: SamplingParams,
    features: bool,
    wanted: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Features, and what few ask for, come down beside, where asked for."""
    fetched: list[str] = []
    sent: list[Any] = []
    given_up: list[Any] = []

    def watch(program: Any) -> Any:
        def run(state: Any, buffer: Any) -> Any:
            leaves = jax.tree.leaves((state, buffer))
            sent.extend(leaf for leaf in leaves if not isinstance(leaf, jax.Array))
            given_up.extend(jax.tree.leaves(state))
            out = program(state, buffer)
            names = ("small", "top", "prompt", "features")
            watched = {
                name: jax.tree.map(lambda a, n=name: Watched(n, a, fetched), getattr(out, name))
                for name in names
            }
            return out._replace(**watched)

        return run

    programs = {bucket: watch(program) for bucket, program in engine._programs.items()}
    monkeypatch.setattr(engine, "_programs", programs)
    machine = VerifyMachine(LIMITS)
    machine.connect(1)
    opening = Open(
        sequence_id=b"1" * 16, epoch=1, tokens=(1, 2, 3), num_prompt_tokens=3, sampling=sampling,
        max_total_tokens=20, stop_tokens=(), wants_features=features,
    )  # fmt: skip
    machine.handle(1, [opening], 0.0)
    engine.run(machine.plan(0.0).works)
    assert len(sent) == 1
    assert set(fetched) == wanted
    assert fetched.count("small") == 1
    assert all(leaf.is_deleted() for leaf in given_up)


def test_listener_hears_compilations() -> None:
    with counted_compiles() as compiles:
        jax.jit(lambda x: x * 3 + 1)(np.arange(13, dtype=np.float32))
    assert len(compiles) >= 1
