"""Makes the goldens of tiny random EAGLE-3 heads with the `speculators` package (float32, eager).

Run in an environment with torch 2.13, transformers 5.x and speculators 0.9 (not one of ours):
    python tests/parity/make_head_goldens.py

One npz per case in goldens/: `config` (config.json as the package saves it, as text), `w/<tensor>`
(float16 values, exact in float32), `features` [T, k·H], `tokens` [T] (token t+1 of each pair) and
`logits` [STEPS, T, K]. In step s row t reads tokens[t + s] and the state of step s - 1, and attends
to the rows of step 0 up to its own and to itself in the later steps; it stands at position 1 + t +
s. Rows that run out of tokens read token 0.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from speculators import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig, Qwen3Config

GOLDENS = Path(__file__).parent / "goldens"
NUM_ROWS = 20
NUM_STEPS = 3
VOCAB_SIZE, DRAFT_VOCAB_SIZE = 61, 37

LAYER: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "intermediate_size": 40,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.3,
    "_attn_implementation": "eager",
}

# case -> (layer class, changes to the layer, changes to the head)
CASES: dict[str, tuple[type, dict[str, Any], dict[str, Any]]] = {
    "head_llama": (LlamaConfig, {}, {}),
    "head_norm_before_residual": (LlamaConfig, {}, {"norm_before_residual": True}),
    "head_norm_before_fc": (LlamaConfig, {}, {"norm_before_fc": True}),
    "head_fc_norm": (LlamaConfig, {}, {"fc_norm": True}),
    "head_norm_output": (LlamaConfig, {}, {"norm_output": True, "norm_before_residual": True}),
    "head_qwen3": (Qwen3Config, {}, {"norm_before_residual": True}),
    "head_three_layers": (LlamaConfig, {"num_hidden_layers": 3}, {}),
    "head_four_states": (
        LlamaConfig,
        {},
        {"eagle_aux_hidden_state_layer_ids": [1, 4, 6, 8]},
    ),
    "head_biases_own_head_dim": (
        LlamaConfig,
        {"head_dim": 10, "attention_bias": True, "mlp_bias": True},
        {},
    ),
    "head_rope_llama3": (
        LlamaConfig,
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
        {},
    ),
    "head_full_vocabulary": (LlamaConfig, {}, {"draft_vocab_size": VOCAB_SIZE}),
}


def build(layer_class: type, layer: dict[str, Any], head: dict[str, Any]) -> Eagle3DraftModel:
    settings: dict[str, Any] = {"draft_vocab_size": DRAFT_VOCAB_SIZE, **head}
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer_class(**{**LAYER, **layer}),
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
        **settings,
    )
    model = Eagle3DraftModel(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms and biases away from 1 and 0
                parameter.add_(0.2 * torch.randn_like(parameter))
            else:
                parameter.normal_(0.0, 0.25)
            parameter.copy_(parameter.half().float())
        if model.d2t is not None:
            kept = torch.randperm(VOCAB_SIZE)[: config.draft_vocab_size].sort().values
            model.d2t.copy_(kept - torch.arange(config.draft_vocab_size))
            model.t2d.zero_()
            model.t2d[kept] = True
    return model


def make(name: str, layer_class: type, layer: dict[str, Any], head: dict[str, Any]) -> None:
    torch.manual_seed(sum(map(ord, name)))
    model = build(layer_class, layer, head)
    features = torch.randn(1, NUM_ROWS, model.fc.in_features).half().float()
    tokens = torch.randint(0, VOCAB_SIZE, (1, NUM_ROWS))
    logits: list[np.ndarray] = []
    model.lm_head.register_forward_hook(
        lambda module, args, output: logits.append(output[0].detach().numpy().copy())
    )
    with torch.no_grad():
        model(
            hidden_states=features,
            input_ids=tokens,
            document_ids=torch.zeros(1, NUM_ROWS, dtype=torch.long),
            ttt_steps=NUM_STEPS,
        )
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        config = json.loads((Path(directory) / "config.json").read_text())
        saved = load_file(Path(directory) / "model.safetensors")
    tensors = {
        f"w/{key}": (value.half() if value.is_floating_point() else value).numpy()
        for key, value in saved.items()
    }
    np.savez_compressed(
        GOLDENS / f"{name}.npz",
        config=np.array(json.dumps(config)),
        features=features[0].numpy().astype(np.float16),
        tokens=tokens[0].numpy().astype(np.int32),
        logits=np.stack(logits),
        **tensors,
    )
    size = (GOLDENS / f"{name}.npz").stat().st_size
    print(f"{name}: {size} bytes, {sorted(saved)}")


def make_pickled() -> None:
    """pytorch_model.bin as torch.save writes it, of every kind of tensor, beside the same as npz.

    Half, bfloat16, float, long and bool; one stored transposed, two sharing a storage. And the case
    head_llama under the names of the EAGLE authors, as midlayer.bin.
    """
    torch.manual_seed(9)
    block = torch.randn(6, 5)
    state = {
        "half": torch.randn(4, 3).half(),
        "bfloat16": torch.randn(3, 2).bfloat16(),
        "long": torch.arange(7) - 3,
        "mask": torch.tensor([True, False, True]),
        "transposed": torch.randn(4, 6).t(),
        "upper": block[:2],
        "right": block[:, 3:],
        "parameter": torch.nn.Parameter(torch.randn(2, 2)),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
    }
    torch.save(state, GOLDENS / "pickled.bin")
    values = {name: value.detach().float().numpy() for name, value in state.items()}
    np.savez_compressed(GOLDENS / "pickled.npz", **values)
    with np.load(GOLDENS / "head_llama.npz") as golden:
        head = {
            name[2:].replace("layers.0.", "midlayer."): torch.from_numpy(golden[name])
            for name in golden.files
            if name.startswith("w/") and "embed_tokens" not in name
        }
    torch.save(head, GOLDENS / "midlayer.bin")


if __name__ == "__main__":
    GOLDENS.mkdir(exist_ok=True)
    for case, settings in CASES.items():
        make(case, *settings)
    make_pickled()
