"""Which replica a sequence goes to: what it has seen, its load, its pages; and names of many."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any, cast

import pytest

from canopy.v1 import verify_pb2
from router.config import RouterConfig
from router.names import Name, Names, parse_name, resolve
from router.placement import BLOCK_TOKENS, Placement, PrefixTable
from router.verify_link import VerifyLink

PROMPT = list(range(3 * BLOCK_TOKENS + 5))


def link(num_pages: int = 1000) -> VerifyLink:
    info = verify_pb2.GetVerifyInfoResponse(num_pages=num_pages, page_size_tokens=16)
    return cast(VerifyLink, Link(info))


class Link:
    def __init__(self, info: verify_pb2.GetVerifyInfoResponse) -> None:
        self.info, self.peer = info, SimpleNamespace(ready=True)


def placement(links: list[VerifyLink], loads: dict[int, int], weight: float = 2.0) -> Placement:
    """`loads`: tokens held, by index of the link."""
    sessions: dict[bytes, Any] = {
        bytes([index]): SimpleNamespace(
            seat=SimpleNamespace(verify=links[index], draft=None),
            machine=SimpleNamespace(generation=SimpleNamespace(max_total_tokens=tokens)),
        )
        for index, tokens in loads.items()
    }
    fleet: Any = SimpleNamespace(verifies=links, drafts=[])
    return Placement(fleet, sessions, weight)


def test_longest_seen_beginning_counts_and_whole_blocks_only() -> None:
    a, b, table = link(), link(), PrefixTable()
    table.note(PROMPT, a)
    table.note([*PROMPT[: BLOCK_TOKENS + 3], 7777], b)
    assert table.num_seen(PROMPT) == {b: BLOCK_TOKENS, a: 3 * BLOCK_TOKENS}
    assert table.num_seen([9, *PROMPT]) == {}
    assert table.num_seen(PROMPT[: BLOCK_TOKENS - 1]) == {}
    table.forget(a)
    assert table.num_seen(PROMPT) == {b: BLOCK_TOKENS}


def test_table_forgets_what_was_seen_longest_ago() -> None:
    a, table = link(), PrefixTable(max_blocks=4)
    table.note(PROMPT, a)
    table.note([5, *PROMPT], a)
    assert len(table) == 4
    assert table.num_seen([5, *PROMPT]) == {a: 3 * BLOCK_TOKENS}
    assert table.num_seen(PROMPT) == {}


def test_replica_that_saw_the_prompt_is_preferred_within_the_bound() -> None:
    links = [link(), link()]
    seen = 3 * BLOCK_TOKENS
    for load, chosen in ((2 * seen - 1, 1), (2 * seen + 1, 0)):
        place = placement(links, {1: load})
        place.note(PROMPT, links[1])
        assert place.verify(PROMPT, 200) is links[chosen], load


def test_without_affinity_load_decides() -> None:
    links = [link(), link()]
    place = placement(links, {1: 1}, weight=0.0)
    place.note(PROMPT, links[1])
    assert place.verify(PROMPT, 200) is links[0]


def test_replica_without_pages_comes_last() -> None:
    links = [link(num_pages=20), link(num_pages=100)]
    place = placement(links, {0: 200, 1: 900})
    place.note(PROMPT, links[0])
    assert place.verify(PROMPT, 120) is links[0]
    assert place.verify(PROMPT, 121) is links[1]
    assert place.verify(PROMPT, 121, but=[links[1]]) is links[0]
    cast(Any, links[0]).peer.ready = False
    assert place.verify(PROMPT, 120) is links[1]


async def test_name_that_cannot_be_resolved_keeps_what_it_stood_for() -> None:
    answers: list[list[str] | OSError] = [["10.0.0.1:5"], socket.gaierror("no"), ["10.0.0.2:5"]]

    async def next_answer(host: str, port: int) -> list[str]:
        assert (host, port) == ("verify.here", 5)
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    name = Name("verify.here", 5)
    names = Names([name], next_answer)
    seen = []
    for _ in range(3):
        await names.refresh()
        seen.append(names.addresses(name))
    assert seen == [["10.0.0.1:5"], ["10.0.0.1:5"], ["10.0.0.2:5"]]


async def test_system_resolver_gives_addresses_of_one_kind() -> None:
    addresses = await resolve("localhost", 81)
    assert addresses in (["127.0.0.1:81"], ["[::1]:81"])
    with pytest.raises(OSError, match=r"not|known|resolution"):
        await resolve("no-such-name.invalid", 81)


def test_names_are_told_from_addresses() -> None:
    assert parse_name("dns:verify.here:50052") == Name("verify.here", 50052)
    assert parse_name("verify.here:50052") is None
    RouterConfig(model=".", verify="dns:v:1,h:2")  # type: ignore[arg-type]  # as from flags
    for wrong in ("dns:v", "dns::5", "dns:v:0", "dns:v:x"):
        with pytest.raises(ValueError, match="dns:HOST:PORT"):
            RouterConfig(model=".", verify=wrong)  # type: ignore[arg-type]
