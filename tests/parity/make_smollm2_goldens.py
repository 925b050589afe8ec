"""Greedy answers of SmolLM2-135M-Instruct by transformers in float32, for the lossless check.

Run in an environment with torch 2.13 and transformers 5.x (not one of ours), on a directory made by
models.fetch:
    python tests/parity/make_smollm2_goldens.py DIRECTORY

One JSON line per prompt in goldens/smollm2_greedy.jsonl: `messages`, `prompt_ids`, `response_ids`
(at most 64, ending at the end-of-sequence token if it comes), `margins` (best minus second best
logit, a token).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import transformers

OUT = Path(__file__).parent / "goldens" / "smollm2_greedy.jsonl"
MAX_NEW_TOKENS = 64

CONVERSATIONS: list[list[tuple[str, str]]] = [
    [("user", "Why does bread rise?")],
    [("user", "Write four lines about a lighthouse in winter.")],
    [("user", "List the numbers from 21 to 40, separated by commas.")],
    [("user", "Write a Python function that reverses the words of a sentence.")],
    [("user", "A farmer has 17 sheep and buys 26 more. How many sheep has he now? Explain.")],
    [("user", "Translate into French: The library opens at nine in the morning.")],
    [("system", "You answer in one short sentence."), ("user", "What is a tide?")],
    [
        ("user", "Name a river in Europe."),
        ("assistant", "The Danube."),
        ("user", "Which countries does it flow through?"),
    ],
    [("user", "Erkläre in zwei Sätzen, was ein Magnet ist. 🧲")],
    [("user", "Repeat the word 'canopy' ten times.")],
    [("user", "Give me a JSON object that describes a bicycle with wheels, colour and price.")],
    [
        (
            "user",
            "Summarise: Bees visit flowers to gather nectar. While they do so, pollen clings to"
            " their legs and is carried on to the next flower. Without them many plants would bear"
            " no fruit, and much of what we eat would become rare and dear. Some farmers therefore"
            " rent hives.",
        )
    ],
]


@torch.no_grad()
def answer(
    model: transformers.PreTrainedModel, prompt_ids: list[int], eos_token_id: int
) -> tuple[list[int], list[float]]:
    """Plain greedy decoding with a cache: (response ids, margin of each)."""
    tokens, cache = torch.tensor([prompt_ids]), transformers.DynamicCache()
    response: list[int] = []
    margins: list[float] = []
    while len(response) < MAX_NEW_TOKENS:
        logits = model(tokens, past_key_values=cache, use_cache=True).logits[0, -1]
        best = torch.topk(logits, 2).values
        response.append(int(torch.argmax(logits)))
        margins.append(round(float(best[0] - best[1]), 5))
        if response[-1] == eos_token_id:
            break
        tokens = torch.tensor([[response[-1]]])
    return response, margins


def main() -> None:
    directory = sys.argv[1]
    torch.set_num_threads(2)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with OUT.open("w", encoding="utf-8") as out:
        for turns in CONVERSATIONS:
            messages = [{"role": role, "content": content} for role, content in turns]
            text = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
            prompt_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            response, margins = answer(model, prompt_ids, tokenizer.eos_token_id)
            line = {
                "messages": messages,
                "prompt_ids": prompt_ids,
                "response_ids": response,
                "margins": margins,
            }
            out.write(json.dumps(line, ensure_ascii=False) + "\n")
            print(f"{len(response)} tokens, least margin {min(margins)}: {turns[-1][1][:50]}")
            print("   ", tokenizer.decode(response)[:150].replace("\n", "\\n"))


if __name__ == "__main__":
    main()
