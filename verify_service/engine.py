"""The target on a device: takes trees and gives tokens, by programs compiled before the first
request, one set per bucket (verify_service/program.py)."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from common.group.leader import Leader, in_step
from common.group.wire import Array
from common.log import get_logger
from kernels.backend import Backend
from kernels.chips import Chip
from kernels.kv_layout import pages_bytes, pages_shape
from models.config import TargetConfig
from models.device import compile_all
from models.eagle3.fusing import FusingHead
from models.layers import Params
from models.packing import pack_parameters, wants_packing
from models.sharding import PAGES_SPEC, WHOLE_SPEC
from models.target import scoring_table
from verify_service.batch import ROW_BUCKETS, BatchShape, Bucket, pack
from verify_service.flights import Flights
from verify_service.follow_up import Chosen
from verify_service.outcomes import HostArrays, cut_outcomes
from verify_service.program import DeviceState, SplitStep, StepOutput, StepParts, WholeStep
from verify_service.resolve import LastRound, no_round
from verify_service.slots import Slots
from verify_service.step import Launched, SequenceOutcome, SequenceWork
from verify_service.token_masks import num_mask_words

Step = WholeStep | SplitStep

_logger = get_logger("verify.engine")

ALL_NODES_UP_TO_ROWS = 64
"""Up to here every row may be a node; larger steps are mostly prefill and have few nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Sizes of an engine. `max_rows`: rows of the largest step, a bucket's size."""

    num_pages: int
    page_size: int  # tokens
    max_sequences: int  # in one step
    max_context_len: int  # tokens of one sequence
    max_tree_nodes: int  # root included
    max_depth: int = 16
    max_ahead_nodes: int = 0  # candidates of a work that follows another; 0: none can
    row_buckets: tuple[int, ...] = ROW_BUCKETS  # ascending; those above max_rows are left out
    max_rows: int = 256
    min_rows: int = 1  # 8 on TPU: one-row matrix products take another, slower path there
    max_stop_tokens: int = 80
    layers_per_program: int | None = None  # None: the whole step is one program
    token_masks: bool = False  # works may have masks: as many programs again, for steps with some
    backend: Backend = Backend.XLA
    chip: Chip | None = None

    @property
    def shape(self) -> BatchShape:
        return BatchShape(
            max_sequences=self.max_sequences,
            pages_per_sequence=-(-self.max_context_len // self.page_size),
            ancestor_words=max(1, -(-(self.max_tree_nodes - 1) // 32)),
            max_stop_tokens=self.max_stop_tokens,
            max_depth=self.max_depth,
            max_ahead_nodes=self.max_ahead_nodes,
        )

    def buckets(self) -> tuple[Bucket, ...]:
        """Every bucket that a step may take, smallest first."""
        smaller = [s for s in self.row_buckets if self.min_rows <= s < self.max_rows]
        sizes = [*smaller, self.max_rows]
        table: list[Bucket] = []
        for size in sizes:
            if size <= ALL_NODES_UP_TO_ROWS:
                table.append(Bucket(size, size))
            else:
                most = min(size, self.max_sequences * self.max_tree_nodes)
                few = {min(n, most) for n in (16, ALL_NODES_UP_TO_ROWS, most)}
                table.extend(Bucket(size, n) for n in sorted(few))
        return tuple(table)


class DeviceEngine:
    """Implements `step.AheadEngine`; on the further hosts of a slice, `common.group.life`'s
    FollowingEngine. Called from one thread.
    """

    def __init__(
        self,
        target: TargetConfig,
        params: Params,
        config: EngineConfig,
        mesh: Mesh | None = None,
        group: Leader | None = None,
        fusing: FusingHead | None = None,
    ) -> None:
        """`mesh`: where `params` are split over chips (`models.target.load_target`). `group`: of
        the leader of several hosts, who are told of everything that runs on all their devices.
        `fusing`: features are given as this head fuses them, else as they are captured.
        """
        self.target, self.config, self.fusing = target, config, fusing
        self._group = group
        if fusing is not None:
            params = {**params, **fusing.params}
        if wants_packing(params):
            params = pack_parameters(params, scoring_table(target))
        self._params = params
        self._mesh = mesh if target.num_shards > 1 else None
        shape = pages_shape(
            num_layers=target.num_layers,
            num_pages=config.num_pages,
            kv_heads=target.stored_kv_heads,
            page_size=config.page_size,
            head_dim=target.head_dim,
        )
        where = None if self._mesh is None else NamedSharding(self._mesh, PAGES_SPEC)
        self._pages = jnp.zeros(shape, target.dtype, device=where)
        num_tokens = target.stored_vocab_size
        self._slots = Slots(config.max_sequences, num_tokens, self._mesh, group)
        self._last = self._no_round()
        self._flights = Flights[StepOutput]()
        self._unfinished: deque[jax.Array] = deque()  # of the leader's steps, on another host
        self.pages_bytes = pages_bytes(shape, target.dtype)
        self._buckets = config.buckets()
        if config.token_masks:
            words = num_mask_words(target.vocab_size)
            self._buckets += tuple(replace(b, mask_words=words) for b in self._buckets)
        self._programs: dict[Bucket, Step] = {}
        self._warm = False
        self.compiles_after_warm_up = 0

    @property
    def row_width(self) -> int:
        """Values in a row of features, as it is given and sent."""
        return self.target.feature_size if self.fusing is None else self.fusing.config.hidden_size

    def warm_up(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Compiles every bucket's program, several at a time."""
        compile_all(self._program, self._buckets, progress)
        self._warm = True

    def run(self, works: Sequence[SequenceWork]) -> list[SequenceOutcome]:
        """See `step.AheadEngine`, for `launch` and `finish` too."""
        if not works:
            return []
        self._flights.check_none()
        return self.finish(self.launch(works))

    def launch(self, works: Sequence[SequenceWork]) -> Launched:
        bucket = self._bucket_for(works)
        self._flights.check(works, self.config.page_size, self.config.max_ahead_nodes)
        buffer = pack(works, self.config.shape, bucket, self._flights.places)
        with in_step(self._group):
            self._slots.prepare(works)
            if self._group is not None:
                number = np.array(self._buckets.index(bucket), np.int32)
                self._group.tell("step", number, buffer)
            out = self._run_program(bucket, buffer)
        out.small.copy_to_host_async()
        if any(work.wants_features for work in works):
            out.features.copy_to_host_async()
        return self._flights.add(works, out)

    def finish(self, launched: Launched) -> list[SequenceOutcome]:
        flight = self._flights.oldest(launched)
        try:
            with in_step(self._group):
                if self._group is not None:
                    self._group.tell("finish")
                outcomes = self._fetch(flight.works, flight.chosen(), flight.output)
        except Exception:
            self._flights.forget()
            raise
        self._flights.retire(outcomes)
        self._slots.note(flight.works, flight.kv_lens(outcomes), self._flights.slots)
        return outcomes

    def follow(self, operation: str, arrays: Sequence[Array]) -> None:
        """See `common.group.life.FollowingEngine`."""
        if operation == "slot":
            self._slots.set(*arrays)
        elif operation == "step":
            number, buffer = arrays
            self._unfinished.append(self._run_program(self._buckets[int(number)], buffer).small)
        else:
            jax.block_until_ready(self._unfinished.popleft())  # type: ignore[no-untyped-call]

    def _no_round(self) -> LastRound | None:
        if not self.config.max_ahead_nodes:
            return None
        where = None if self._mesh is None else NamedSharding(self._mesh, WHOLE_SPEC)
        sizes = self.config.max_sequences, self.config.max_depth
        empty: LastRound = jax.jit(no_round, static_argnums=(0, 1), out_shardings=where)(*sizes)
        return empty

    def _state(self) -> DeviceState:
        return DeviceState(self._pages, self._slots.state, self._last)

    def _run_program(self, bucket: Bucket, buffer: Array) -> StepOutput:
        out = self._program(bucket)(self._state(), buffer)
        self._pages, self._slots.state, self._last = out.state
        return out

    def _fetch(
        self, works: Sequence[SequenceWork], chosen: Sequence[Chosen | None], out: StepOutput
    ) -> list[SequenceOutcome]:
        """A step's results on the host: one transfer, and others for what is asked for."""
        small = self.config.shape.results().views(np.asarray(out.small))
        wanted = any(work.wants_features for work in works)
        return cut_outcomes(
            works,
            chosen,
            small,
            top=_fetch(out.top, any(work.sampling.top_logprobs for work in works)),
            prompt=_fetch(out.prompt, any(work.num_scored for work in works)),
            features=np.asarray(out.features) if wanted else None,
        )

    def _bucket_for(self, works: Sequence[SequenceWork]) -> Bucket:
        """The smallest bucket that holds the works. Raises ValueError naming what is too large."""
        config = self.config
        if len(works) > config.max_sequences:
            raise ValueError(f"works: {len(works)} in a step; at most {config.max_sequences}")
        for work in works:
            work.validate(self.target.vocab_size, config.page_size)
            if work.page_ids.size > config.shape.pages_per_sequence:
                raise ValueError(
                    f"page_ids: {work.page_ids.size}; at most {config.shape.pages_per_sequence}"
                )
            if work.num_nodes > config.max_tree_nodes or work.max_depth > config.max_depth:
                raise ValueError(
                    f"tree: {work.num_nodes} nodes, depth {work.max_depth};"
                    f" at most {config.max_tree_nodes} and {config.max_depth}"
                )
            if work.num_nodes + work.num_scored > config.max_tree_nodes:
                raise ValueError(
                    f"scored: {work.num_scored} beside {work.num_nodes} nodes; at most"
                    f" {config.max_tree_nodes} together"
                )
            if len(work.stop_tokens) > config.max_stop_tokens:
                raise ValueError(
                    f"stop_tokens: {len(work.stop_tokens)}; at most {config.max_stop_tokens}"
                )
        num_rows = sum(work.num_rows for work in works)
        num_nodes = sum(work.num_nodes + work.num_scored for work in works)
        masked = any(work.token_mask is not None for work in works)
        if masked and not config.token_masks:
            raise ValueError("token_mask: the engine was made without token_masks")
        for bucket in self._buckets:
            if bool(bucket.mask_words) != masked:
                continue
            if bucket.num_rows >= num_rows and bucket.num_nodes >= num_nodes:
                return bucket
        raise ValueError(f"works: {num_rows} rows in a step; at most {config.max_rows}")

    def _program(self, bucket: Bucket) -> Step:
        if bucket in self._programs:
            return self._programs[bucket]
        if self._warm:
            self.compiles_after_warm_up += 1
            _logger.warning("compile after warm-up", rows=bucket.num_rows, nodes=bucket.num_nodes)
        begun = time.monotonic()
        config = self.config
        parts = StepParts(
            target=self.target,
            shape=config.shape,
            bucket=bucket,
            backend=config.backend,
            chip=config.chip,
            fusing=None if self.fusing is None else self.fusing.config,
        )
        state = self._state()
        program: Step
        if config.layers_per_program is None or self._mesh is not None:
            program = WholeStep(parts, self._params, state, self._mesh)
        else:
            program = SplitStep(parts, self._params, state, config.layers_per_program)
        seconds = round(time.monotonic() - begun, 2)
        _logger.info("compiled", rows=bucket.num_rows, nodes=bucket.num_nodes, seconds=seconds)
        self._programs[bucket] = program
        return program


def _fetch(arrays: dict[str, jax.Array], wanted: bool) -> HostArrays | None:
    return jax.device_get(arrays) if wanted else None
