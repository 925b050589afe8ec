"""Replicas behind a name: they come, drain and go under load. Real gRPC, a toy resolver."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import trustme

from common.security import ServerTls
from tests.protocol.router_simulators import Host
from tests.protocol.router_world import World, router_world, simulated_peers, until
from tests.protocol.test_router_fleet import PROMPTS, ask, check_all, draft_toy, verify_toy
from tests.protocol.test_router_service import check, request, tokens_of
from tests.unit.router_tiny import write_model

NAMES = {"verify": ("dns:verify.toy:1",), "draft": ("dns:draft.toy:1",)}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("names") / "toy")


@dataclass
class Zone:
    """What the names stand for."""

    hosts: dict[str, list[Host]] = field(default_factory=dict)
    num_asked: int = 0

    async def resolve(self, host: str, port: int) -> list[str]:
        self.num_asked += 1
        if not self.hosts.get(host):
            raise OSError("no such name")
        return [replica.address for replica in self.hosts[host]]


@contextlib.asynccontextmanager
async def named(
    model: Path, tls: ServerTls | None = None, **settings: Any
) -> AsyncIterator[tuple[World, Zone, list[Host], list[Host]]]:
    """A router that knows names alone; each stands for one replica of two."""
    verifies, drafts = zip(simulated_peers(model), simulated_peers(model), strict=True)
    for host in (*verifies, *drafts):
        host.tls = tls
    for host in verifies:
        host.simulator.trouble.delay_seconds = 0.02
    zone = Zone({"verify.toy": [verifies[0]], "draft.toy": [drafts[0]]})
    async with router_world(
        model,
        verifies[0],
        drafts[0],
        more_verify=verifies[1:],
        more_draft=drafts[1:],
        resolve=zone.resolve,
        resolve_seconds=0.05,
        fail_over_seconds=0.1,
        names=NAMES,
        **settings,
    ) as world:
        yield world, zone, list(verifies), list(drafts)


def addresses(world: World) -> list[str]:
    return [peer.address for peer in world.service.core.fleet.peers if peer.linked]


async def test_new_replicas_of_a_name_take_sequences(model: Path) -> None:
    async with named(model) as (world, zone, verifies, drafts):
        assert addresses(world) == [verifies[0].address, drafts[0].address]
        zone.hosts = {"verify.toy": verifies, "draft.toy": drafts}
        await until(lambda: len(addresses(world)) == 4)
        running = ask(world, 100)
        await until(lambda: [len(verify_toy(host).sequences) for host in verifies] == [3, 3])
        await until(lambda: [len(draft_toy(host).sequences) for host in drafts] == [3, 3])
        await check_all(running, 100)


async def test_replica_that_left_its_name_finishes_what_it_has(model: Path) -> None:
    async with named(model) as (world, zone, verifies, drafts):
        running = ask(world, 80)
        await until(lambda: len(verify_toy(verifies[0]).sequences) == 6)
        zone.hosts = {"verify.toy": verifies[1:], "draft.toy": drafts[1:]}
        await until(lambda: len(addresses(world)) == 4)
        await check_all(running, 80)
        assert verify_toy(verifies[1]).num_opens == 0
        for host in (verifies[0], drafts[0]):
            await host.stop()
        await until(lambda: addresses(world) == [verifies[1].address, drafts[1].address])
        assert len(world.service.core.fleet.peers) == 2, "those that left are let go of"
        answer = await world.generate(**request(token_ids=tokens_of(PROMPTS[0]), max_tokens=20))
        check(answer, PROMPTS[0], 20)


async def test_lost_replica_is_replaced_by_what_its_name_stands_for_then(model: Path) -> None:
    """A pod that dies comes back under another address; its sequences go on there."""
    async with named(model) as (world, zone, verifies, drafts):
        running = ask(world, 120)
        await until(lambda: len(verify_toy(verifies[0]).sequences) == 6)
        await asyncio.sleep(0.1)
        zone.hosts = {"verify.toy": verifies[1:], "draft.toy": drafts[1:]}
        for host in (verifies[0], drafts[0]):
            await host.stop()
            host.simulator.toy.crash()
        await check_all(running, 120)
        assert verify_toy(verifies[1]).num_opens == 6
        assert all(t.result().completion.speculation.num_accepted > 10 for t in running)


async def test_name_without_addresses_is_waited_for(model: Path) -> None:
    async with named(model) as (world, zone, verifies, drafts):
        zone.hosts = {"verify.toy": [verifies[0]], "draft.toy": []}
        await drafts[0].stop()
        asked = zone.num_asked
        await until(lambda: zone.num_asked > asked + 2)
        answer = await world.generate(**request(token_ids=tokens_of(PROMPTS[1]), max_tokens=20))
        check(answer, PROMPTS[1], 20)
        zone.hosts["draft.toy"] = [drafts[1]]
        await until(lambda: drafts[1].address in addresses(world))


async def test_certificate_is_checked_for_the_name_not_the_address(
    model: Path, tmp_path: Path
) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca"))
    made = authority.issue_cert("verify.toy", "draft.toy")
    made.cert_chain_pems[0].write_to_path(str(tmp_path / "cert"))
    made.private_key_pem.write_to_path(str(tmp_path / "key"))
    tls = ServerTls(cert=tmp_path / "cert", key=tmp_path / "key")
    async with named(model, tls, peer_ca=tmp_path / "ca") as (world, _, verifies, drafts):
        assert addresses(world) == [verifies[0].address, drafts[0].address]
