"""On-policy data: the target's own responses to prompts, many at once over a dense cache."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from draft_service.training.target_states import MASKED, dense_attend
from models.checkpoint import read_json
from models.config import TargetConfig
from models.layers import Params
from models.target import load_target, target_forward, target_logits

Cache = jax.Array
"""[L, B, C, kv_heads, 2*head_dim]"""


@dataclass(frozen=True, kw_only=True)
class GenerateSettings:
    """What `canopy head generate-data` is asked for."""

    target: Path
    prompts: Path
    output: Path
    max_tokens: int = 192
    max_prompt_tokens: int = 320
    temperature: float = 0.0
    batch: int = 32
    limit: int | None = None
    seed: int = 0


def generate_responses(settings: GenerateSettings) -> Iterator[dict[str, Any]]:
    """Appends one row per prompt to the output; yields progress after each batch.

    A row: id, temperature, finish ("stop" or "length"), prompt_ids, response_ids (the stop token
    is its last one). A prompt's id is its line number unless the row has one. Raises ValueError
    on bad rows.
    """
    config, params = load_target(settings.target, boundaries=())
    prompts = _wanted_prompts(settings)
    prompts.sort(key=lambda item: len(item[1]))  # like lengths share a batch
    started, num_tokens = time.monotonic(), 0
    with settings.output.open("a") as output:
        for start in range(0, len(prompts), settings.batch):
            chunk = prompts[start : start + settings.batch]
            responses = respond(
                config,
                params,
                [ids for _, ids in chunk],
                jax.random.key(settings.seed + start),
                settings.max_tokens,
                settings.temperature,
                rows=settings.batch,
            )
            for (name, ids), response in zip(chunk, responses, strict=True):
                stopped = response[-1] in config.eos_token_ids
                entry = {
                    "id": name,
                    "temperature": settings.temperature,
                    "finish": "stop" if stopped else "length",
                    "prompt_ids": ids,
                    "response_ids": response,
                }
                output.write(json.dumps(entry) + "\n")
                num_tokens += len(response)
            output.flush()
            rate = num_tokens / (time.monotonic() - started)
            done = start + len(chunk)
            yield {"responses": done, "of": len(prompts), "tokens_per_second": round(rate, 1)}


def respond(
    config: TargetConfig,
    params: Params,
    prompts: list[list[int]],
    key: jax.Array,
    max_tokens: int,
    temperature: float,
    rows: int | None = None,
) -> list[list[int]]:
    """The target's response to each prompt, its stop token included. `rows`: pad the batch to."""
    tokens, lengths = _pad(prompts, rows or len(prompts))
    responses = _generate(
        config,
        params,
        tokens,
        lengths,
        key,
        max_tokens=max_tokens,
        temperature=temperature,
        stop_ids=config.eos_token_ids,
    )
    own = np.asarray(responses)[: len(prompts)]
    return [[int(token) for token in row if token >= 0] for row in own]


def _wanted_prompts(settings: GenerateSettings) -> list[tuple[Any, list[int]]]:
    """(id, prompt token ids) of the prompts that the output lacks."""
    chat = Chat(settings.target)
    known = set()
    if settings.output.exists():
        known = {json.loads(line)["id"] for line in settings.output.read_text().splitlines()}
    wanted = []
    for number, line in enumerate(settings.prompts.read_text().splitlines()):
        if settings.limit is not None and number == settings.limit:
            break
        row = json.loads(line)
        if not isinstance(row.get("prompt"), str):
            raise ValueError(f"{settings.prompts}:{number + 1}: prompt is missing or not text")
        name = row.get("id", number)
        ids = chat.ids(row["prompt"])
        if name not in known and len(ids) <= settings.max_prompt_tokens:
            wanted.append((name, ids))
    return wanted


class Chat:
    """A target's tokenizer and chat template."""

    def __init__(self, target: Path) -> None:
        """Raises ValueError where the target has no template."""
        self._tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
        self._template = _chat_template(target)

    def ids(self, prompt: str) -> list[int]:
        """Token ids of one user turn, up to where the answer begins."""
        messages = [{"role": "user", "content": prompt}]
        text = self._template.render(messages=messages, add_generation_prompt=True)
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def _chat_template(target: Path) -> Any:
    """The target's own template. Raises ValueError where it has none."""
    fields = read_json(target / "tokenizer_config.json")
    source = fields.get("chat_template")
    beside = target / "chat_template.jinja"
    if source is None and beside.exists():
        source = beside.read_text()
    if not isinstance(source, str):
        raise ValueError(f"target: {target} has no chat template; on-policy chat data needs one")
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    special = {key: _text_of(fields.get(key)) for key in ("bos_token", "eos_token")}
    return environment.from_string(source, globals=special)


def _text_of(token: Any) -> str:
    return str(token["content"] if isinstance(token, dict) else token or "")


def _pad(prompts: list[list[int]], rows: int) -> tuple[jax.Array, jax.Array]:
    """int32 [rows, C] with C a multiple of 64, padded on the right; int32 [rows] lengths (>= 1)."""
    columns = -(-max(map(len, prompts)) // 64) * 64
    tokens, lengths = np.zeros((rows, columns), np.int32), np.ones(rows, np.int32)
    for row, ids in enumerate(prompts):
        tokens[row, : len(ids)], lengths[row] = ids, len(ids)
    return jnp.asarray(tokens), jnp.asarray(lengths)


def generate_batch(
    config: TargetConfig,
    params: Params,
    tokens: jax.Array,
    lengths: jax.Array,
    key: jax.Array,
    *,
    max_tokens: int,
    temperature: float,
    stop_ids: tuple[int, ...],
) -> jax.Array:
    """int32 [B, max_tokens]: each sequence's response, its stop token included, then -1.

    `tokens` int32 [B, P], padded on the right to P; `lengths` int32 [B].
    """
    batch, columns = tokens.shape
    positions = jnp.tile(jnp.arange(columns, dtype=jnp.int32), batch)
    hidden, block_kv, _ = target_forward(
        config, params, tokens.reshape(-1), positions, dense_attend(config, batch, columns)
    )
    rows = block_kv.reshape(config.num_layers, batch, columns, *block_kv.shape[2:])
    cache = jnp.pad(rows, [(0, 0), (0, 0), (0, max_tokens), (0, 0), (0, 0)])
    last = hidden.reshape(batch, columns, -1)[jnp.arange(batch), lengths - 1]
    stops = jnp.asarray(stop_ids or (-2,), jnp.int32)

    def choose(states: jax.Array, step: jax.Array) -> jax.Array:
        logits = target_logits(config, params, states)
        if temperature > 0:
            noise = jax.random.gumbel(jax.random.fold_in(key, step), logits.shape)
            logits = logits / jnp.float32(temperature) + noise
        picks: jax.Array = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return picks

    def more(carry: tuple[Any, ...]) -> jax.Array:
        step, _, _, _, live = carry
        going: jax.Array = (step < max_tokens) & jnp.any(live)
        return going

    def advance(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        step, cache, states, response, live = carry
        token = choose(states, step)
        response = response.at[:, step].set(jnp.where(live, token, -1))
        live = live & ~jnp.isin(token, stops)
        states, cache = _decode(config, params, cache, token, lengths + step)
        return step + 1, cache, states, response, live

    empty: jax.Array = jnp.full((batch, max_tokens), -1, jnp.int32)
    start = (jnp.int32(0), cache, last, empty, jnp.ones(batch, bool))
    response: jax.Array = jax.lax.while_loop(more, advance, start)[3]
    return response


_generate = jax.jit(
    generate_batch, static_argnames=("config", "max_tokens", "temperature", "stop_ids")
)


def _decode(
    config: TargetConfig, params: Params, cache: Cache, tokens: jax.Array, positions: jax.Array
) -> tuple[jax.Array, Cache]:
    """One token of every sequence, int32 [B], at `positions` [B] → hidden [B, Ht], new cache."""
    batch = tokens.shape[0]
    column = jnp.arange(cache.shape[2])
    sequence = jnp.arange(batch)

    def attend(layer: int, q: jax.Array, block_kv: jax.Array) -> jax.Array:
        full: jax.Array = cache[layer].at[sequence, positions].set(block_kv)
        seen = column[None] <= positions[:, None]
        window = config.windows[layer]
        if window is not None:
            seen &= column[None] > positions[:, None] - window
        k, v = jnp.split(full, 2, axis=-1)
        grouped = q.reshape(batch, config.num_kv_heads, -1, config.head_dim)
        scores = jnp.einsum("bkgd,bckd->bkgc", grouped, k, preferred_element_type=jnp.float32)
        scores = scores * jnp.float32(config.attention_scale)
        weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, MASKED), axis=-1)
        mixed: jax.Array = jnp.einsum("bkgc,bckd->bkgd", weights.astype(v.dtype), v)
        return mixed.reshape(q.shape)

    hidden, block_kv, _ = target_forward(config, params, tokens, positions, attend)
    written: Cache = cache.at[:, sequence, positions].set(block_kv)
    return hidden, written
