"""Where a generation ends: tokens that are final, taken one by one up to its last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.actions import Finished, FinishReason
from router.generation import Generation
from router.output_text import OutputText


@dataclass(frozen=True, slots=True)
class Taken:
    """What a round came to: so many of its tokens, their text, and the end if it lies in them."""

    num_tokens: int
    text: str
    finished: Finished | None


class Emission:
    """`tokens`: prompt and all emitted."""

    def __init__(self, generation: Generation, text: OutputText) -> None:
        self.tokens = list(generation.prompt_tokens)
        self._num_prompt_tokens = len(self.tokens)
        self._text = text
        self._stop_ids = frozenset(generation.stop_token_ids)
        self._max_total_tokens = generation.max_total_tokens
        self._min_tokens = generation.sampling.min_tokens

    @property
    def room(self) -> int:
        """Tokens that may still be emitted."""
        return self._max_total_tokens - len(self.tokens)

    def take(self, tokens: Sequence[int]) -> Taken:
        """Appends a round's tokens up to where the generation ends, if it ends in them."""
        if self._stop_ids.isdisjoint(tokens) and len(tokens) < self.room:  # nearly always
            text = self._text.push_all(tokens)
            if text is not None:
                self.tokens += tokens
                return Taken(len(tokens), text, None)
        pieces: list[str] = []
        for num_taken, token in enumerate(tokens, 1):
            self.tokens.append(token)
            finished = self._take_one(token, pieces)
            if finished is not None:
                pieces.append(self._text.finish())
                return Taken(num_taken, "".join(pieces), finished)
        return Taken(len(tokens), "".join(pieces), None)

    def finish(self) -> str:
        """The text that was held back, when the generation ends for another reason."""
        return self._text.finish()

    def _take_one(self, token: int, pieces: list[str]) -> Finished | None:
        """Adds the token's text to `pieces`. A stop token has none."""
        if token in self._stop_ids:
            return Finished(FinishReason.STOP, stop_token_id=token)
        num_emitted = len(self.tokens) - self._num_prompt_tokens
        pieces.append(self._text.push(token, may_stop=num_emitted > self._min_tokens))
        if self._text.matched_stop is not None:
            return Finished(FinishReason.STOP, stop_string=self._text.matched_stop)
        return Finished(FinishReason.LENGTH) if self.room <= 0 else None
