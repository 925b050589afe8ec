"""Four answers to one question in one call: they share the prompt's work, not its chances."""

from __future__ import annotations

import sys

from canopy import Client, Message, Options


def main(address: str = "127.0.0.1:50051") -> None:
    question = [Message("user", "Write one line about the sea.")]
    options = Options(n=4, temperature=0.9, seed=5, max_tokens=24)
    with Client(address) as client:
        for choice in client.generate_choices(question, options, timeout_seconds=120):
            print(f"{choice.completion.choice_index}: {choice.text!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
