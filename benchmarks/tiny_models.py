"""A whole target, and a head for it, small enough to be served or trained for in seconds: random
weights, bytes as tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from canopy import library
from models.config import read_target_config
from models.families import family_named
from models.target import flatten, init_target
from models.writing import LazyTensor, write_safetensors

EOS, IM_START, IM_END = 256, 257, 258
VOCAB_SIZE = 260
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "vocab_size": VOCAB_SIZE,
    "tie_word_embeddings": True,
    "eos_token_id": EOS,
}


def write_tiny_target(
    directory: Path,
    seed: int = 0,
    change: Callable[[dict[str, Any]], None] = lambda weights: None,
    **changes: Any,
) -> Path:
    """Config, weights, tokenizer and chat template. Weights are large: far from near ties.

    `change` alters the weights, float32 [out, in] by name; `changes` are fields of the config.
    """
    settings = {**CONFIG, **changes}
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(settings))
    config = read_target_config(directory, boundaries=[])
    name_of = family_named(config.family).tensor_name
    weights = {}
    for path, leaf in flatten(init_target(config, seed)):
        value = np.asarray(leaf) * (8.0 if leaf.ndim > 1 else 1.0)
        kernel = path[-1] == "kernel"
        weights[name_of(path)] = np.ascontiguousarray(value.T if kernel else value)
    change(weights)
    tensors = {name: LazyTensor.of(weights[name]) for name in sorted(weights)}
    write_safetensors(directory / "model.safetensors", tensors)
    _tokenizer().save(str(directory / "tokenizer.json"))
    fields = {"chat_template": CHAT_TEMPLATE, "eos_token": "<|eos|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(fields))
    return directory


def write_tiny_pair(folder: Path) -> tuple[Path, Path]:
    """A target and a head made of its last layer; the directories of both."""
    target = write_tiny_target(folder / "target")
    return target, library.init_head(target, folder / "head", draft_vocab=VOCAB_SIZE)


def _tokenizer() -> Tokenizer:
    vocab = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = ("<|eos|>", "<|im_start|>", "<|im_end|>")
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
    return tokenizer
