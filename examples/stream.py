"""Streams one answer: text as it becomes final, then how it came about."""

from __future__ import annotations

import sys

from canopy import Client, Completion, Message, Options


def main(address: str = "127.0.0.1:50051") -> None:
    question = [Message("user", "Name three kinds of bread.")]
    with Client(address) as client:
        for event in client.stream(question, Options(max_tokens=48), timeout_seconds=120):
            if isinstance(event, Completion):
                stats = event.speculation
                print(f"\n{event.num_completion_tokens} tokens in {stats.num_rounds} rounds")
            else:
                print(event.text, end="", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
