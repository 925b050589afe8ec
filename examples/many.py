"""Asks many questions at once and says what became of each."""

from __future__ import annotations

import asyncio
import sys

from canopy import AsyncClient, CanopyError, Message, Options, Retry

QUESTIONS = ("What is a kite?", "What is rain?", "What is salt?", "What is a lens?")


async def ask(client: AsyncClient, question: str) -> str:
    """The answer, or why there is none. A full or draining router is asked again, a few times, as
    long as nothing of the answer has come; what has begun is never begun anew.
    """
    try:
        answer = await client.generate(
            [Message("user", question)], Options(max_tokens=24), timeout_seconds=120
        )
    except CanopyError as error:
        return f"{error.code}: {error}"
    return answer.text


async def main(address: str = "127.0.0.1:50051") -> None:
    async with AsyncClient(address, Retry(max_attempts=5)) as client:
        answers = await asyncio.gather(*(ask(client, question) for question in QUESTIONS))
    for question, answer in zip(QUESTIONS, answers, strict=True):
        print(f"{question} {answer!r}")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
