"""Detokenizer, stop strings, and the two in a row: whole characters, the first stop string."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from tokenizers import Tokenizer

from common.types import SamplingParams
from router.detokenizer import Decoding, Detokenizer
from router.emission import Emission
from router.generation import Generation
from router.output_text import OutputText
from router.stops import StopStrings
from tests.unit.router_tiny import IM_START, byte_fallback_tokenizer, byte_level_tokenizer

BYTE_LEVEL = byte_level_tokenizer()
BYTE_FALLBACK = byte_fallback_tokenizer()


def decoding_of(tokenizer: Tokenizer) -> Decoding:
    return Decoding(tokenizer, json.loads(tokenizer.to_str())["decoder"])


def pieces_of(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    return [*(detokenizer.push(id_) for id_ in ids), detokenizer.finish()]


def fallback_ids(text: str) -> list[int]:
    return [3 + byte for byte in text.encode()]


# -- byte-level BPE


def test_a_character_of_four_bytes_comes_out_with_its_last() -> None:
    pieces = pieces_of(decoding_of(BYTE_LEVEL).detokenizer(), list("a😀b".encode()))
    assert pieces == ["a", "", "", "", "😀", "b", ""]


def test_bytes_of_an_unfinished_character_never_come_out() -> None:
    pieces = pieces_of(decoding_of(BYTE_LEVEL).detokenizer(), list("a😀".encode())[:-1])
    assert pieces == ["a", "", "", "", ""]


def test_a_wrong_byte_is_a_replacement_character_as_in_the_whole() -> None:
    ids = [0xE4, 0xB8, ord("x"), 0xFF, ord("y")]
    pieces = pieces_of(decoding_of(BYTE_LEVEL).detokenizer(), ids)
    assert pieces == ["", "", "\ufffdx", "\ufffd", "y", ""]
    assert "".join(pieces) == BYTE_LEVEL.decode(ids)


def test_special_tokens_and_rows_without_a_token_have_no_text() -> None:
    ids = [0xC3, IM_START, 5000, 0xA9]
    assert "".join(pieces_of(decoding_of(BYTE_LEVEL).detokenizer(), ids)) == "é"


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 299), max_size=40))
def test_byte_level_pieces_make_the_whole_text(ids: list[int]) -> None:
    whole = BYTE_LEVEL.decode(ids, skip_special_tokens=True)
    text = "".join(pieces_of(decoding_of(BYTE_LEVEL).detokenizer(), ids))
    # An unfinished character at the end is the one thing that stays out.
    assert whole in (text, text + "\ufffd")


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=40).filter(lambda text: "<|" not in text))
def test_byte_level_text_comes_out_as_it_went_in(text: str) -> None:
    """But for what spells a special token, which is not text."""
    ids = BYTE_LEVEL.encode(text).ids
    pieces = pieces_of(decoding_of(BYTE_LEVEL).detokenizer(), ids)
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


# -- byte fallback


def test_byte_fallback_waits_for_the_end_of_its_run() -> None:
    ids = [BYTE_FALLBACK.token_to_id("▁a"), *fallback_ids("世"), BYTE_FALLBACK.token_to_id("b")]
    pieces = pieces_of(decoding_of(BYTE_FALLBACK).detokenizer(), ids)
    assert pieces == ["a", "", "", "", "世b", ""]


def test_byte_fallback_gives_whole_characters_at_the_end_and_no_part_of_one() -> None:
    ids = [BYTE_FALLBACK.token_to_id("a"), *fallback_ids("世界")[:-1]]
    pieces = pieces_of(decoding_of(BYTE_FALLBACK).detokenizer(), ids)
    assert "".join(pieces) == "a世"


def test_the_leading_space_is_stripped_once() -> None:
    word = BYTE_FALLBACK.token_to_id("▁the")
    pieces = pieces_of(decoding_of(BYTE_FALLBACK).detokenizer(), [word, word])
    assert pieces == ["the", " the", ""]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, BYTE_FALLBACK.get_vocab_size() - 1), max_size=30))
def test_byte_fallback_pieces_make_the_whole_text(ids: list[int]) -> None:
    end = BYTE_FALLBACK.token_to_id(".")
    whole = BYTE_FALLBACK.decode([*ids, end], skip_special_tokens=True)
    assert "".join(pieces_of(decoding_of(BYTE_FALLBACK).detokenizer(), [*ids, end])) == whole


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.one_of(st.sampled_from(["▁a", "▁the", "ll", "▁", "é"]), st.sampled_from("世😀¿ж")),
        max_size=12,
    )
)
def test_byte_fallback_never_gives_a_broken_character(words: list[str]) -> None:
    ids: list[int] = []
    for word in words:
        known = BYTE_FALLBACK.token_to_id(word)
        ids += fallback_ids(word) if known is None else [known]
    for cut in range(len(ids) + 1):
        pieces = pieces_of(decoding_of(BYTE_FALLBACK).detokenizer(), ids[:cut])
        assert not any("\ufffd" in piece for piece in pieces)


# -- stop strings


def split(text: str, cuts: list[int]) -> list[str]:
    places = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    return [text[a:b] for a, b in itertools.pairwise(places)]


def run_stops(stops: list[str], pieces: list[str]) -> tuple[list[str], str | None]:
    matcher = StopStrings(stops)
    shown = []
    for piece in pieces:
        shown.append(matcher.push(piece))
        if matcher.matched is not None:
            return shown, matcher.matched
    return [*shown, matcher.finish()], None


@pytest.mark.parametrize(
    ("stops", "pieces", "shown", "matched"),
    [
        ([], ["ab", "c"], ["ab", "c", ""], None),
        (["END"], ["abEN", "Dc"], ["ab", ""], "END"),
        (["END"], ["xENDy"], ["x"], "END"),
        (["END"], ["E", "N", "x"], ["", "", "ENx", ""], None),
        (["END"], ["abE"], ["ab", "E"], None),
        (["aab"], ["a", "a", "a", "b"], ["", "", "a", ""], "aab"),
        (["b", "abc"], ["abc"], ["a"], "b"),  # complete first
        (["bc", "abc"], ["xabc"], ["x"], "abc"),  # complete at one place: the longer
    ],
)
def test_the_text_ends_before_the_first_complete_stop_string(
    stops: list[str], pieces: list[str], shown: list[str], matched: str | None
) -> None:
    assert run_stops(stops, pieces) == (shown, matched)


def first_stop_by_hand(text: str, stops: list[str]) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


letters = st.text(alphabet="abé", max_size=25)


@settings(max_examples=400, deadline=None)
@given(
    letters,
    st.lists(st.text(alphabet="abé", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(0, 25), max_size=8),
)
def test_stops_do_not_depend_on_how_the_text_is_cut(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    shown, matched = run_stops(stops, split(text, cuts))
    assert ("".join(shown), matched) == first_stop_by_hand(text, stops)


@settings(max_examples=200, deadline=None)
@given(letters, st.text(alphabet="ab", min_size=1, max_size=4))
def test_no_more_is_held_back_than_could_start_a_stop_string(text: str, stop: str) -> None:
    matcher = StopStrings([stop])
    shown = ""
    for length, letter in enumerate(text, start=1):
        shown += matcher.push(letter)
        if matcher.matched is not None:
            return
        held = text[len(shown) : length]
        starts = [
            stop[:size] for size in range(1, len(stop)) if text[:length].endswith(stop[:size])
        ]
        assert held == max(starts, key=len, default="")


# -- both


@settings(max_examples=200, deadline=None)
@given(
    st.text(alphabet="aé世😀", max_size=15),
    st.lists(st.text(alphabet="aé世😀", min_size=1, max_size=3), max_size=2),
)
def test_stop_strings_hold_across_bytes(text: str, stops: list[str]) -> None:
    output = OutputText(decoding_of(BYTE_LEVEL).detokenizer(), StopStrings(stops))
    shown = ""
    for byte in text.encode():
        shown += output.push(byte)
        if output.matched_stop is not None:
            break
    shown += output.finish()
    assert (shown, output.matched_stop) == first_stop_by_hand(text, stops)


# -- a round's tokens at one time


class OneByOne(OutputText):
    """Takes no tokens together."""

    def push_all(self, token_ids: Sequence[int]) -> str | None:
        return None


@settings(max_examples=200, deadline=None)
@given(st.data())
@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["bytes", "fallback"])
def test_tokens_together_come_to_what_they_do_one_by_one(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    """Stop tokens, stop strings and the last token in the midst of a round included."""
    ids = st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), min_size=1, max_size=5)
    generation = Generation(
        request_id="r",
        prompt_tokens=(5,),
        sampling=SamplingParams(),
        max_total_tokens=data.draw(st.integers(2, 24)),
        stop_strings=data.draw(st.sampled_from([(), ("e",)])),
        stop_token_ids=data.draw(st.sampled_from([(), tuple(range(0, 300, 9))])),
    )
    decoding = decoding_of(tokenizer)
    together, one_by_one = (
        Emission(generation, kind(decoding.detokenizer(), StopStrings(generation.stop_strings)))
        for kind in (OutputText, OneByOne)
    )
    for tokens in data.draw(st.lists(ids, max_size=6)):
        taken = together.take(tokens)
        assert taken == one_by_one.take(tokens)
        assert together.tokens == one_by_one.tokens
        if taken.finished is not None:
            return
    assert together.finish() == one_by_one.finish()
