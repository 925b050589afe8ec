"""Whatever a router puts into a frame, the service answers with events that fit on the wire."""

from __future__ import annotations

from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st
from verify_toy import VOCAB, ToyEngine

from canopy.v1 import types_pb2, verify_pb2
from common.types import Drafting
from verify_service.codec import decode_request, encode_events
from verify_service.draft_gate import FixedWay
from verify_service.limits import VerifyLimits
from verify_service.machine import VerifyMachine

LIMITS = VerifyLimits(
    vocab_size=VOCAB, max_context_len=24, max_tree_nodes=8, max_tree_depth=4, max_sequences=2,
    max_waiting_sequences=2, page_size=3, num_pages=9, max_step_tokens=10, max_prefill_tokens=4,
)  # fmt: skip

small = st.integers(0, 9)
uint32 = small | st.sampled_from([2**31 - 1, 2**31, 2**32 - 1])
uint64 = small | st.sampled_from([2**63, 2**64 - 1])
real = st.sampled_from([0.0, -1.0, 0.5, 1.0, 1e38, float("inf"), float("-inf"), float("nan")])
sampling = st.builds(
    types_pb2.SamplingParams, temperature=real, top_k=uint32, top_p=real, min_p=real, seed=uint64,
    presence_penalty=real, min_tokens=small, ignore_eos=st.booleans(),
)  # fmt: skip
tree = st.builds(
    types_pb2.DraftTree,
    tokens=st.lists(uint32, max_size=9),
    parents=st.lists(uint32, max_size=9),
    scores=st.lists(real, max_size=9),
)
shape = st.builds(types_pb2.TreeShape, max_depth=uint32, top_k=uint32, max_nodes=uint32)
bodies = st.one_of(
    st.builds(
        lambda **open_: {"open": verify_pb2.VerifyOpen(**open_)},
        tokens=st.lists(small, max_size=9) | st.lists(uint32, max_size=9),
        num_prompt_tokens=uint32, sampling=sampling | st.just(types_pb2.SamplingParams()),
        stop_token_ids=st.lists(uint32, max_size=3), max_total_tokens=st.just(20) | uint32,
        round=uint64, wants_features=st.booleans(), choice_index=st.just(0) | uint32,
        fork_of=st.sampled_from([b"", b"x" * 15, b"a" * 16, b"b" * 16]),
        runs_on=st.booleans(), draft_ahead=st.booleans(),
    ),
    st.builds(lambda p: {"attach": verify_pb2.VerifyAttach(features_from=p)}, uint32),
    st.builds(
        lambda r, k, t: {"verify_tree": verify_pb2.VerifyTree(round=r, kv_len=k, tree=t)},
        uint64, uint32, tree,
    ),
    st.builds(
        lambda r, k, t, m: {
            "tree_ahead": verify_pb2.VerifyTreeAhead(round=r, kv_len=k, tree=t, most=m)
        },
        uint64, uint32, tree, st.none() | shape,
    ),
    st.just({"acknowledge": verify_pb2.VerifyAcknowledge()}),
    st.builds(
        lambda n, r: {"rollback": verify_pb2.VerifyRollback(committed_len=n, round=r)},
        uint32, uint64,
    ),
    st.just({"close": verify_pb2.VerifyClose()}),
    st.builds(
        lambda p: {"replay_features": verify_pb2.VerifyReplayFeatures(position=p)}, uint32
    ),
    st.just({}),
)  # fmt: skip
commands = st.builds(
    lambda i, e, a, body: verify_pb2.VerifyCommand(sequence_id=i, epoch=e, acked_round=a, **body),
    st.sampled_from([b"", b"x" * 15, b"a" * 16, b"b" * 16]),
    uint64,
    st.none() | uint64,
    bodies,
)


def run(machine: VerifyMachine, engine: ToyEngine, request: verify_pb2.VerifyRequest) -> None:
    found, errors = decode_request(1, request)
    events = [machine.with_state(error) for error in errors]
    events += machine.handle(1, found, 0.0)
    for _ in range(3):
        plan = machine.plan(0.0)
        events += plan.events + machine.retire(plan.works, engine.run(plan.works), 0.0)
    encode_events(events).SerializeToString()
    machine.check_balance()


@given(st.lists(commands, min_size=1, max_size=12), st.sampled_from(Drafting))
@settings(max_examples=300, deadline=None)
def test_any_command_is_answered_and_breaks_nothing(
    frame: list[verify_pb2.VerifyCommand], way: Drafting
) -> None:
    machine = VerifyMachine(LIMITS, gate=FixedWay(way))
    engine = ToyEngine(LIMITS.num_pages, LIMITS.page_size)
    machine.connect(1)
    for command in frame:
        run(machine, engine, verify_pb2.VerifyRequest(commands=[command]))


@given(st.binary(max_size=200))
@settings(max_examples=200, deadline=None)
def test_any_bytes_that_are_a_frame_are_answered(data: bytes) -> None:
    try:
        request = verify_pb2.VerifyRequest.FromString(data)
    except DecodeError:
        return  # gRPC refuses it
    machine = VerifyMachine(LIMITS)
    machine.connect(1)
    run(machine, ToyEngine(LIMITS.num_pages, LIMITS.page_size), request)
