"""Prompts as tokens: ids as they are, text and chats through the tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from router.chat import ChatTemplateError
from router.errors import RequestError
from router.requests import Prompt
from router.tokenizer import ModelTokenizer

_ON_THREAD_CHARACTERS = 4096
"""Longer prompts are encoded off the event loop: a megabyte takes a third of a second."""


async def encode(prompt: Prompt, tokenizer: ModelTokenizer, max_context_len: int) -> Sequence[int]:
    """Raises RequestError for a chat that the model's template refuses, and for a text so long that
    even the longest tokens could not bring it within `max_context_len`: encoding it takes seconds.
    """
    if prompt.token_ids is not None:
        return prompt.token_ids
    most = max_context_len * tokenizer.longest_token
    if prompt.num_characters > most:
        raise RequestError(
            "prompt",
            f"{prompt.num_characters} characters are more than a context of {max_context_len}"
            " tokens can hold; send less",
        )
    if prompt.num_characters > _ON_THREAD_CHARACTERS:
        return await asyncio.to_thread(_encode_now, prompt, tokenizer)
    return _encode_now(prompt, tokenizer)


def _encode_now(prompt: Prompt, tokenizer: ModelTokenizer) -> list[int]:
    if prompt.messages is None:
        return tokenizer.encode(prompt.text or "")
    try:
        return tokenizer.encode_chat(prompt.messages)
    except ChatTemplateError as error:
        raise RequestError("chat", str(error)) from None
