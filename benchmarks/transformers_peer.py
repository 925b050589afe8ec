"""transformers' own generate, asked line by line: run by `benchmarks.throughput` in an environment
that has torch and transformers, and none of ours.

    PYTHON benchmarks/transformers_peer.py MODEL_DIRECTORY

Answers a line of JSON {"prompts": [[ids], ...], "max_tokens": N} with {"first_seconds": to the
first tokens, "seconds": to the last}; all prompts are equally long, greedy, float32, nothing stops
early. The first line out says what runs.
"""

from __future__ import annotations

import json
import sys
import time

import torch
import transformers


class Marks(transformers.StoppingCriteria):
    """Notes when each token came, and stops nothing."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


@torch.no_grad()
def main() -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
    model.eval()
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps({"versions": versions, "threads": torch.get_num_threads()}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        tokens, marks = torch.tensor(asked["prompts"]), Marks()
        begun = time.perf_counter()
        model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=asked["max_tokens"],
            min_new_tokens=asked["max_tokens"],
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=transformers.StoppingCriteriaList([marks]),
        )
        first, last = marks.times[0] - begun, marks.times[-1] - begun
        print(json.dumps({"first_seconds": first, "seconds": last}), flush=True)


if __name__ == "__main__":
    main()
