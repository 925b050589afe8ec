"""Makes the goldens of tiny random targets with transformers (float32, eager attention).

Run in an environment with torch 2.13 and transformers 5.x (not one of ours):
    python tests/parity/make_goldens.py            # all, or the cases named: … qwen3 mistral_window

One npz per case in goldens/: `config` (config.json as text), `w/<tensor>` (float16 values, exact in
float32), `tokens` [T], `logits` [T, V], `boundaries` [L+1, T, H]: the residual stream entering each
layer, and last the one before the final norm.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file

GOLDENS = Path(__file__).parent / "goldens"
NUM_ROWS = 40

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
}

MISTRAL: dict[str, Any] = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
QWEN2: dict[str, Any] = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 8,
}
QWEN3_MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "head_dim": 8,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
}

CASES: dict[str, dict[str, Any]] = {
    "llama_untied": {},
    "llama_tied": {"tie_word_embeddings": True, "rope_theta": 100000.0},
    "llama_biases": {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4},
    "llama_own_head_dim": {"head_dim": 10, "num_key_value_heads": 1},
    "llama_rope_llama3": {
        "rope_theta": 500.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "llama_rope_linear": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama_rope_yarn": {
        "head_dim": 16,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "mistral_window": {**MISTRAL, "sliding_window": 12},
    "mistral_no_window": {**MISTRAL, "sliding_window": None, "head_dim": 10},
    "qwen2": {**QWEN2, "tie_word_embeddings": True},
    "qwen2_window": {
        **QWEN2,
        "use_sliding_window": True,
        "sliding_window": 9,
        "max_window_layers": 1,
    },
    "qwen3": {**QWEN3},
    "qwen3_biases_windows": {
        **QWEN3,
        "attention_bias": True,
        "sliding_window": 7,
        "use_sliding_window": True,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "qwen3_moe": {**QWEN3_MOE, "norm_topk_prob": True},
    "qwen3_moe_some_dense": {
        **QWEN3_MOE,
        "norm_topk_prob": False,
        "decoder_sparse_step": 2,
        "num_hidden_layers": 4,
        "mlp_only_layers": [3],
    },
}


def make(name: str, changes: dict[str, Any]) -> None:
    raw = {**BASE, **changes}
    torch.manual_seed(sum(map(ord, name)))
    config = transformers.AutoConfig.for_model(**raw)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms and biases away from 1 and 0
                parameter.add_(0.2 * torch.randn_like(parameter))
            parameter.copy_(parameter.half().float())
    captured: list[np.ndarray] = []

    def capture(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        stream = args[0] if args else kwargs["hidden_states"]
        captured.append(stream[0].detach().numpy().copy())

    for module in [*model.model.layers, model.model.norm]:
        module.register_forward_pre_hook(capture, with_kwargs=True)
    tokens = torch.randint(0, raw["vocab_size"], (1, NUM_ROWS))
    with torch.no_grad():
        logits = model(tokens).logits[0].numpy()
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)  # names as published: the model's own may be joined
        stored = load_file(f"{directory}/model.safetensors")
    tensors = {f"w/{key}": value.half().numpy() for key, value in stored.items()}
    np.savez_compressed(
        GOLDENS / f"{name}.npz",
        config=np.array(json.dumps(raw)),
        tokens=tokens[0].numpy().astype(np.int32),
        logits=logits,
        boundaries=np.stack(captured),
        **tensors,
    )
    print(f"{name}: {(GOLDENS / f'{name}.npz').stat().st_size} bytes")


if __name__ == "__main__":
    GOLDENS.mkdir(exist_ok=True)
    for case in sys.argv[1:] or CASES:
        make(case, CASES[case])
