"""The hosts of a slice as a group: joined, told the same, and over together."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from group_of_threads import SETTINGS, Group

from common.errors import ConfigError, StartupError
from common.group import follower as follower_module
from common.group import leader as leader_module
from common.group.follower import Follower
from common.group.leader import in_step
from common.group.terms import GroupLost, GroupTerms, terms_of
from common.group.wire import Kind, frame, json_frame
from verify_service.config import VerifyConfig

FACTS = {"weights_hash": "ab"}


@pytest.fixture
def pair() -> Iterator[Group]:
    group = Group(2)
    yield group
    group.close()


@pytest.fixture
def three() -> Iterator[Group]:
    group = Group(3)
    yield group
    group.close()


def test_operations_reach_every_follower_in_order_and_unchanged(three: Group) -> None:
    followers = three.joined()
    assert three.leader.num_missing == 0
    for one in followers:
        one.ready(FACTS)
    three.leader.await_ready(FACTS)
    random = np.random.default_rng(0)
    arrays = [
        np.array(3, np.int32),
        random.integers(0, 99, (5, 7)).astype(np.int32),
        random.normal(size=(2, 3, 4)).astype(np.float32),
        np.zeros((0, 4), np.uint32),
    ]
    for number in range(50):
        three.leader.tell(f"step{number}", *arrays)
    ending = threading.Thread(target=three.leader.end)
    ending.start()
    for one in followers:
        operations = list(one.operations())  # ends, for the leader ends the group
        assert [operation.name for operation in operations] == [f"step{i}" for i in range(50)]
        for operation in operations:
            for got, sent in zip(operation.arrays, arrays, strict=True):
                np.testing.assert_array_equal(got, sent)
                assert got.dtype == sent.dtype
        one.close()
    ending.join(20)
    assert not ending.is_alive()
    assert three.lost.empty()


def test_other_settings_are_refused_by_name_with_both_values(pair: Group) -> None:
    stranger = Follower(pair.terms(1, max_sequences=8), pair.lost.put)
    with pytest.raises(StartupError, match="max_sequences: 8 there, 4 here"):
        stranger.join()
    assert pair.leader.num_missing == 1
    pair.joined()
    assert pair.leader.num_missing == 0


def test_a_host_that_is_there_already_is_refused(three: Group) -> None:
    first = three.follower(1)
    joining = threading.Thread(target=first.join)
    joining.start()
    _until(lambda: three.leader.num_missing == 1)
    with pytest.raises(StartupError, match="host_id: 1 is not awaited"):
        three.follower(1).join()
    three.follower(2).join()
    joining.join(20)


def test_a_host_may_go_and_come_back_until_all_are_there(three: Group) -> None:
    with socket.create_connection(three.address) as connection:
        hello = {"host_id": 1, "settings": SETTINGS}
        connection.sendall(json_frame(Kind.HELLO, hello))
        _until(lambda: three.leader.num_missing == 1)
    _until(lambda: three.leader.num_missing == 2)
    assert len(three.joined()) == 2
    assert three.lost.empty()


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"",
        frame(Kind.HELLO, b"no JSON"),
        json_frame(Kind.HELLO, {"host_id": "1", "settings": 7}),
    ],
)
def test_strangers_on_the_port_hinder_nobody(pair: Group, garbage: bytes) -> None:
    with socket.create_connection(pair.address) as connection:
        connection.sendall(garbage)
    pair.joined()


def test_a_lost_follower_ends_the_group_for_all(three: Group) -> None:
    one, _ = three.joined()
    one.close()
    reasons = {three.lost.get(timeout=20) for _ in range(2)}  # the leader's and the other's
    assert reasons == {"host 1 of the slice is gone: the connection was closed"}
    assert three.leader.num_missing >= 1
    with pytest.raises(GroupLost, match="host 1 of the slice is gone"):
        three.leader.tell("step", np.zeros(3, np.int32))


def test_a_lost_leader_is_noticed_while_nothing_is_done(pair: Group) -> None:
    pair.joined()
    pair.leader.close()
    assert pair.lost.get(timeout=20) == "the leader of the slice is gone: the connection was closed"


def test_a_silent_host_is_lost(pair: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader_module, "SILENCE_SECONDS", 0.5)
    with socket.create_connection(pair.address) as connection:
        connection.sendall(json_frame(Kind.HELLO, {"host_id": 1, "settings": SETTINGS}))
        connection.sendall(frame(Kind.PONG))  # the last that it says
        assert "host 1 of the slice is gone" in pair.lost.get(timeout=20)


def test_a_silent_leader_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower_module, "SILENCE_SECONDS", 0.5)
    lost: queue.Queue[str] = queue.Queue()
    with socket.create_server(("127.0.0.1", 0)) as server:
        terms = GroupTerms(address=server.getsockname(), num_hosts=2, host_id=1, settings={})
        one = Follower(terms, lost.put)
        joining = threading.Thread(target=one.join)
        joining.start()
        connection, _ = server.accept()
        with connection:
            connection.sendall(frame(Kind.WELCOME))
            joining.join(20)
            assert "silent for" in lost.get(timeout=20)
        one.close()


def test_hosts_that_loaded_something_else_do_not_start(pair: Group) -> None:
    (one,) = pair.joined()
    one.ready({"weights_hash": "cd"})
    with pytest.raises(GroupLost, match="weights_hash: 'cd' there, 'ab' here"):
        pair.leader.await_ready(FACTS)
    assert "has loaded something else" in pair.lost.get(timeout=20)


def test_a_follower_that_fails_says_why(pair: Group) -> None:
    (one,) = pair.joined()
    one.fail("out of memory")
    assert pair.lost.get(timeout=20) == "host 1 of the slice is gone: out of memory"


def test_a_follower_asked_to_stop_asks_the_leader(pair: Group) -> None:
    (one,) = pair.joined()
    drained = threading.Event()
    pair.leader.on_drain = drained.set
    one.ask_to_drain()
    assert drained.wait(20)
    assert pair.lost.empty()


def test_a_step_that_fails_ends_the_group_and_on_one_host_only_itself(pair: Group) -> None:
    pair.joined()
    failed = "a step failed on host 0 of the slice: no memory"
    with pytest.raises(GroupLost, match=failed), in_step(pair.leader):
        raise RuntimeError("no memory")
    with pytest.raises(RuntimeError, match="no memory"), in_step(None):
        raise RuntimeError("no memory")


# -- settings

MODEL = ["--model", "somewhere"]


def test_a_leader_worker_set_places_the_host() -> None:
    environ = {
        "LWS_LEADER_ADDRESS": "canopy-verify-0.canopy-verify.serving",
        "LWS_GROUP_SIZE": "2",
        "LWS_WORKER_INDEX": "1",
    }
    config = VerifyConfig.load([*MODEL, "--tensor-parallel", "8"], environ)
    assert (config.num_hosts, config.host_id) == (2, 1)
    assert config.group_address == ("canopy-verify-0.canopy-verify.serving", 8480)
    flags = ["--num-hosts", "1", "--host-id", "0"]
    assert VerifyConfig.load([*MODEL, *flags], environ).num_hosts == 1


def test_hosts_of_one_slice_have_the_same_terms_and_another_batch_has_not() -> None:
    flags = [*MODEL, "--num-hosts", "2", "--tensor-parallel", "2"]
    flags += ["--coordinator-address", "[::1]:99"]
    ours = terms_of(VerifyConfig.load([*flags, "--port", "7"], {}))
    theirs = terms_of(VerifyConfig.load([*flags, "--host-id", "1", "--log-format", "json"], {}))
    assert ours.address == ("::1", 99)
    assert ours.settings == theirs.settings
    assert theirs.host_id == 1
    other = terms_of(VerifyConfig.load([*flags, "--max-sequences", "3"], {}))
    assert other.settings != ours.settings


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--host-id", "1"], r"host_id: 1 is outside \[0, 1\)"),
        (["--num-hosts", "2", "--tensor-parallel", "3"], "tensor_parallel: 3 chips"),
        (
            ["--num-hosts", "2", "--tensor-parallel", "2"],
            "coordinator_address: '' is not HOST:PORT",
        ),
        (
            ["--num-hosts", "2", "--tensor-parallel", "2", "--coordinator-address", "a:65535"],
            "coordinator_address: 'a:65535'",
        ),
    ],
)
def test_groups_that_cannot_be_are_refused(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        VerifyConfig.load([*MODEL, *flags], {})


def _until(condition: Callable[[], bool]) -> None:
    waited = threading.Event()
    for _ in range(400):
        if condition():
            return
        waited.wait(0.05)
    raise AssertionError("it did not come true within 20 s")
