"""Turns a GGUF file of a Llama model with a byte-level BPE into a Hugging Face-style directory.

Weights are dequantised to float32, which is exact. llama.cpp keeps the rows of q and k in an order
of its own, for rotation of neighbouring channels; that is undone here, for rotation of halves.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from models.checkpoint import HostArray
from models.errors import FetchError
from models.writing import LazyTensor, write_json, write_safetensors

CONTROL_TOKEN = 3  # gguf's token type of special tokens

_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GgufLlama:
    """An open GGUF file; the methods write one file each of the model directory."""

    def __init__(self, path: Path) -> None:
        self.reader = gguf.GGUFReader(str(path))
        architecture = self.field("general.architecture")
        if architecture != "llama":
            raise FetchError(
                f"{path}: holds architecture {architecture!r}; only 'llama' is converted"
            )

    def field(self, key: str) -> Any:
        """The value of a metadata field. Raises FetchError when the file has none."""
        found = self.reader.get_field(key)
        if found is None:
            raise FetchError(f"gguf: metadata {key} is missing; the file is not the expected one")
        return found.contents()

    def config(self) -> dict[str, Any]:
        """config.json."""
        hidden, heads = (
            self.field("llama.embedding_length"),
            self.field("llama.attention.head_count"),
        )
        names = {tensor.name for tensor in self.reader.tensors}
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": len(self.field("tokenizer.ggml.tokens")),
            "hidden_size": hidden,
            "num_hidden_layers": self.field("llama.block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self.field("llama.attention.head_count_kv"),
            "head_dim": hidden // heads,
            "intermediate_size": self.field("llama.feed_forward_length"),
            "hidden_act": "silu",
            "max_position_embeddings": self.field("llama.context_length"),
            # stored as float32 there; the model's own config has the short decimal
            "rms_norm_eps": float(f"{self.field('llama.attention.layer_norm_rms_epsilon'):.6g}"),
            "rope_theta": float(self.field("llama.rope.freq_base")),
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": "output.weight" not in names,
            "bos_token_id": self.field("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self.field("tokenizer.ggml.eos_token_id"),
            "pad_token_id": self.field("tokenizer.ggml.padding_token_id"),
            "torch_dtype": "float32",
        }

    def write_configs(self, directory: Path) -> None:
        """config.json, generation_config.json, tokenizer_config.json."""
        config = self.config()
        write_json(directory / "config.json", config)
        ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
        write_json(directory / "generation_config.json", ids)
        tokens = self.field("tokenizer.ggml.tokens")
        tokenizer_config = {
            "tokenizer_class": "GPT2Tokenizer",
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": config["max_position_embeddings"],
            "bos_token": tokens[ids["bos_token_id"]],
            "eos_token": tokens[ids["eos_token_id"]],
            "pad_token": tokens[ids["pad_token_id"]],
            "unk_token": tokens[self.field("tokenizer.ggml.unknown_token_id")],
            "chat_template": self.field("tokenizer.chat_template"),
        }
        write_json(directory / "tokenizer_config.json", tokenizer_config)

    def write_tokenizer(self, directory: Path) -> None:
        """tokenizer.json: BPE over bytes, each digit by itself, control tokens special."""
        pre = self.field("tokenizer.ggml.pre")
        if pre != "smollm":
            raise FetchError(
                f"gguf: pre-tokenizer {pre!r} is not known; only 'smollm' is converted"
            )
        tokens = self.field("tokenizer.ggml.tokens")
        merges = [tuple(merge.split(" ")) for merge in self.field("tokenizer.ggml.merges")]
        vocabulary = {token: index for index, token in enumerate(tokens)}
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
        tokenizer.decoder = decoders.ByteLevel()
        kinds = self.field("tokenizer.ggml.token_type")
        special = [t for t, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
        tokenizer.add_special_tokens(
            [AddedToken(t, normalized=False, special=True) for t in special]
        )
        tokenizer.save(str(directory / "tokenizer.json"))

    def write_weights(
        self, directory: Path, progress: Callable[[int, int], None] | None = None
    ) -> None:
        """model.safetensors, float32."""
        tensors = {
            self._name(tensor.name): LazyTensor(
                np.dtype(np.float32),
                tuple(int(n) for n in reversed(tensor.shape)),  # gguf counts the fastest axis first
                functools.partial(self._dequantised, tensor),
            )
            for tensor in self.reader.tensors
            if tensor.name != "rope_freqs.weight"  # derived from config
        }
        write_safetensors(directory / "model.safetensors", tensors, progress)

    def _name(self, name: str) -> str:
        top = {
            "token_embd.weight": "model.embed_tokens.weight",
            "output_norm.weight": "model.norm.weight",
            "output.weight": "lm_head.weight",
        }
        if name in top:
            return top[name]
        match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
        if match is None or match[2] not in _TENSORS:
            raise FetchError(f"gguf: tensor {name} is not known; the file is not the expected one")
        return f"model.layers.{match[1]}.{_TENSORS[match[2]]}.weight"

    def _dequantised(self, tensor: Any) -> HostArray:
        weights: HostArray = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        weights = weights.astype(np.float32, copy=False)
        if ".attn_q." in tensor.name:
            return _unpermuted(weights, self.field("llama.attention.head_count"))
        if ".attn_k." in tensor.name:
            return _unpermuted(weights, self.field("llama.attention.head_count_kv"))
        return weights


def _unpermuted(weights: HostArray, heads: int) -> HostArray:
    """[out, in]: each head's rows from (pair, half) order back to (half, pair) order."""
    pairs = weights.shape[0] // heads // 2
    return weights.reshape(heads, pairs, 2, -1).swapaxes(1, 2).reshape(weights.shape)
