"""The router over real gRPC between simulated peers: text, trouble, refusals."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from canopy.v1 import generation_pb2, types_pb2
from tests.protocol.router_toys import continuation, toy_logprob
from tests.protocol.router_world import Answer, World, collect, router_world, simulated_peers, until
from tests.unit.router_tiny import EOS, IM_END, write_model

PROMPT = [104, 101, 108, 108, 111]
STOPS = {EOS, IM_END}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("router") / "toy")


@pytest.fixture
async def world(model: Path) -> AsyncIterator[World]:
    verify, draft = simulated_peers(model)
    async with router_world(model, verify, draft) as running:
        yield running


def expected(prompt: list[int], num_tokens: int) -> list[int]:
    """What the target writes, up to and with a stop token."""
    tokens = continuation(prompt, num_tokens)
    ends = [index for index, token in enumerate(tokens) if token in STOPS]
    return tokens[: ends[0] + 1] if ends else tokens


def request(**fields: Any) -> dict[str, Any]:
    options = generation_pb2.ReturnOptions(token_ids=True)
    defaults = {
        "token_ids": generation_pb2.TokenIds(ids=PROMPT),
        "max_tokens": 40,
        "return_options": options,
    }
    return defaults | fields


def tokens_of(prompt: list[int]) -> generation_pb2.TokenIds:
    return generation_pb2.TokenIds(ids=prompt)


def check(answer: Answer, prompt: list[int], num_tokens: int) -> None:
    assert answer.token_ids == expected(prompt, num_tokens)
    assert answer.completion.usage.num_completion_tokens == len(answer.token_ids)


async def test_tokens_are_the_targets_own_with_trees_and_without(world: World) -> None:
    with_trees = await world.generate(**request())
    check(with_trees, PROMPT, 40)
    speculation = with_trees.completion.speculation
    assert speculation.num_accepted > 0
    assert speculation.num_emitted == speculation.num_accepted + speculation.num_rounds
    assert speculation.num_root_only_rounds == 0
    assert speculation.acceptance_length > 2
    alone = await world.generate(
        **request(speculation=generation_pb2.SpeculationParams(enabled=False))
    )
    check(alone, PROMPT, 40)
    assert alone.completion.speculation.num_accepted == 0
    assert alone.completion.speculation.acceptance_length == 1.0
    assert alone.text == with_trees.text
    await until(lambda: not world.verify_simulator.toy.sequences)
    await until(lambda: not world.draft_simulator.toy.sequences)
    assert world.draft_simulator.toy.num_ignored_rows == 0


async def test_many_at_once_share_frames_and_none_is_mixed_up(world: World) -> None:
    # A step that takes a while: what becomes ready meanwhile goes in one frame.
    world.verify_simulator.trouble.delay_seconds = 0.02
    generator = random.Random(1)
    prompts = [[generator.randrange(250) for _ in range(5)] for _ in range(24)]
    answers = await asyncio.gather(
        *(world.generate(**request(token_ids=tokens_of(prompt))) for prompt in prompts)
    )
    for prompt, answer in zip(prompts, answers, strict=True):
        check(answer, prompt, 40)
    assert max(world.verify_simulator.frames) > 4
    assert len({answer.completion.request_id for answer in answers}) == 24


async def test_text_and_chat_prompts_are_encoded_by_the_models_own_rules(world: World) -> None:
    options = generation_pb2.ReturnOptions(prompt_token_ids=True)
    text = await world.generate(text="hello", max_tokens=1, return_options=options)
    assert list(text.chunks[0].prompt_token_ids) == world.service._tokenizer.encode("hello")
    messages = [generation_pb2.ChatMessage(role="user", content="hé <|im_end|>")]
    chat = await world.generate(
        chat=generation_pb2.ChatMessages(messages=messages), max_tokens=1, return_options=options
    )
    rendered = "<|im_start|>user\nhé <|im_end|><|im_end|>\n<|im_start|>assistant\n"
    tokenizer = world.service._tokenizer
    assert list(chat.chunks[0].prompt_token_ids) == tokenizer.encode(rendered)


async def test_seed_is_made_and_returned(world: World) -> None:
    sampling = types_pb2.SamplingParams(temperature=0.7, seed=2**64 - 1)
    named = await world.generate(**request(sampling=sampling))
    assert named.completion.seed == 2**64 - 1
    seeds = {(await world.generate(**request(max_tokens=1))).completion.seed for _ in range(3)}
    assert len(seeds) == 3


async def test_trace_shows_each_round(world: World) -> None:
    options = generation_pb2.ReturnOptions(token_ids=True, trace=True, pick_margins=True)
    answer = await world.generate(**request(return_options=options))
    check(answer, PROMPT, 40)
    traces = [chunk.trace for chunk in answer.chunks if chunk.HasField("trace")]
    assert [trace.round for trace in traces] == list(range(len(traces)))
    assert len(traces) == answer.completion.speculation.num_rounds
    rebuilt: list[int] = []
    for trace in traces:
        rebuilt += [trace.tree.tokens[node] for node in trace.accepted_nodes]
        rebuilt.append(trace.bonus_token)
        assert len(trace.token_texts) == len(trace.tree.tokens) + 1
    assert rebuilt == answer.token_ids
    assert sum(len(chunk.pick_margins) for chunk in answer.chunks) == len(answer.token_ids)


async def test_timings_add_up(world: World) -> None:
    timings = (await world.generate(**request())).completion.timings
    shares = (
        timings.draft_seconds
        + timings.verify_seconds
        + timings.transport_seconds
        + timings.router_seconds
    )
    assert shares == pytest.approx(timings.total_seconds, rel=1e-6)
    assert 0 < timings.time_to_first_token_seconds < timings.total_seconds
    assert timings.verify_seconds > 0
    assert timings.draft_seconds > 0


# -- where a generation ends


async def test_max_tokens_cuts_inside_a_block(world: World) -> None:
    for num_tokens in range(1, 8):
        answer = await world.generate(**request(max_tokens=num_tokens))
        assert answer.token_ids == continuation(PROMPT, num_tokens)
        assert answer.completion.finish_reason == generation_pb2.FINISH_REASON_LENGTH


async def test_a_stop_token_of_the_request_ends_inside_a_block(world: World) -> None:
    tokens = continuation(PROMPT, 30)
    stop = tokens[11]
    answer = await world.generate(**request(stop_token_ids=[stop]))
    assert answer.token_ids == tokens[: tokens.index(stop) + 1]
    assert answer.completion.finish_reason == generation_pb2.FINISH_REASON_STOP
    assert answer.completion.stop_token_id == stop
    assert answer.text == world.service._tokenizer.decode(answer.token_ids[:-1])


async def test_the_models_own_stop_token_is_ignored_if_asked(world: World) -> None:
    prompt = next(
        [start, 1, 2] for start in range(250) if set(continuation([start, 1, 2], 30)) & STOPS
    )
    ended = await world.generate(**request(token_ids=tokens_of(prompt)))
    check(ended, prompt, 40)
    assert ended.completion.finish_reason == generation_pb2.FINISH_REASON_STOP
    sampling = types_pb2.SamplingParams(ignore_eos=True)
    longer = await world.generate(**request(token_ids=tokens_of(prompt), sampling=sampling))
    assert longer.token_ids == continuation(prompt, 40)
    assert longer.completion.finish_reason == generation_pb2.FINISH_REASON_LENGTH


async def test_a_stop_string_ends_the_text_before_it(world: World) -> None:
    whole = await world.generate(**request())
    for start in range(2, len(whole.text) - 3, 3):
        stop = whole.text[start : start + 3]
        answer = await world.generate(**request(stop=["never here", stop]))
        assert answer.text == whole.text[: whole.text.index(stop)]
        assert answer.completion.stop_string == stop
        assert answer.completion.finish_reason == generation_pb2.FINISH_REASON_STOP
        assert answer.token_ids == whole.token_ids[: len(answer.token_ids)]


async def test_no_stop_string_is_looked_for_within_the_least_length(world: World) -> None:
    whole = await world.generate(**request())
    stop = whole.text[2:5]
    sampling = types_pb2.SamplingParams(min_tokens=20)
    answer = await world.generate(**request(stop=[stop], sampling=sampling))
    assert whole.text.index(stop) == 2
    assert answer.token_ids == whole.token_ids[: len(answer.token_ids)]
    assert len(answer.token_ids) > 20


async def test_sampling_options_reach_verify_and_logprobs_come_back(world: World) -> None:
    sampling = types_pb2.SamplingParams(
        presence_penalty=0.5,
        frequency_penalty=-1.0,
        repetition_penalty=1.5,
        logit_bias={7: -2.0, 3: 1.0},
        min_tokens=2,
        seed=1,
    )
    options = {"logprobs": True, "top_logprobs": 3, "max_tokens": 7, "sampling": sampling}
    answer = await world.generate(**request(**options))
    opened = world.verify_simulator.toy.last_open
    for name in ("presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens"):
        assert getattr(opened.sampling, name) == getattr(sampling, name)
    assert opened.sampling.logit_bias == sampling.logit_bias
    assert (opened.logprobs, opened.top_logprobs) == (True, 3)
    logprobs = [value for chunk in answer.chunks for value in chunk.logprobs]
    assert logprobs == [toy_logprob(token) for token in answer.token_ids]  # cut with the tokens
    top = [place for chunk in answer.chunks for place in chunk.top_logprobs]
    assert [place.tokens[0] for place in top] == answer.token_ids
    assert all(len(place.tokens) == len(place.logprobs) == 3 for place in top)


async def test_no_chunk_holds_a_broken_character(world: World) -> None:
    broken = 0
    for start in range(12):
        prompt = [start, 5, 9]
        answer = await world.generate(**request(token_ids=tokens_of(prompt)))
        ids = [t for t in answer.token_ids if t not in STOPS]
        whole = world.service._tokenizer.decode(ids)
        assert whole in (answer.text, answer.text + "\ufffd")
        broken += whole != answer.text
    assert broken  # some ended within a character


# -- peers in trouble


async def test_repeated_events_change_nothing(world: World) -> None:
    world.verify_simulator.trouble.repeat = True
    world.draft_simulator.trouble.repeat = True
    check(await world.generate(**request()), PROMPT, 40)


async def test_a_silent_draft_costs_its_deadline_only(model: Path) -> None:
    verify, draft = simulated_peers(model)
    async with router_world(model, verify, draft, tree_seconds=0.05) as world:
        world.draft_simulator.trouble.mute = True
        answer = await world.generate(**request())
        check(answer, PROMPT, 40)
        assert answer.completion.speculation.num_root_only_rounds > 10
        assert answer.completion.speculation.num_accepted == 0
        # One tree is under way and never comes: later rounds do not wait for it.
        assert answer.completion.timings.total_seconds < 2


async def test_a_late_draft_catches_up(model: Path) -> None:
    verify, draft = simulated_peers(model)
    async with router_world(model, verify, draft, tree_seconds=0.05) as world:
        world.draft_simulator.trouble.delay_seconds = 0.12
        world.verify_simulator.trouble.delay_seconds = 0.01
        call = world.stub.Generate(generation_pb2.GenerateRequest(**request(max_tokens=120)))
        running = asyncio.create_task(collect(call))
        await asyncio.sleep(0.4)
        world.draft_simulator.trouble.delay_seconds = 0.0
        answer = await running
        check(answer, PROMPT, 120)
        assert answer.completion.speculation.num_root_only_rounds > 0
        assert answer.completion.speculation.num_accepted > 0


async def test_draft_lost_and_back_in_mid_stream(world: World) -> None:
    world.verify_simulator.trouble.delay_seconds = 0.02
    call = world.stub.Generate(generation_pb2.GenerateRequest(**request(max_tokens=300)))
    running = asyncio.create_task(collect(call))
    await asyncio.sleep(0.2)
    await world.draft.stop()
    world.draft_simulator.toy.crash()
    await asyncio.sleep(0.2)
    before = world.draft_simulator.toy.num_trees
    await world.draft.start()
    answer = await running
    check(answer, PROMPT, 300)
    assert world.draft_simulator.toy.num_trees > before
    assert answer.completion.speculation.num_root_only_rounds > 0


async def test_verify_lost_and_back_shows_no_gap_and_no_repeat(world: World) -> None:
    world.verify_simulator.trouble.delay_seconds = 0.02
    prompts = [[start, 1, 7] for start in range(6)]
    calls = [
        world.stub.Generate(
            generation_pb2.GenerateRequest(**request(token_ids=tokens_of(p), max_tokens=200))
        )
        for p in prompts
    ]
    running = [asyncio.create_task(collect(call)) for call in calls]
    for crash in (False, True):
        await asyncio.sleep(0.3)
        await world.verify.stop()
        if crash:
            world.verify_simulator.toy.crash()
        await until(lambda: not world.health.serving)
        await world.verify.start()
        await until(lambda: world.health.serving)
    for prompt, task in zip(prompts, running, strict=True):
        check(await task, prompt, 200)


async def test_verify_lost_for_good_is_unavailable(model: Path) -> None:
    verify, draft = simulated_peers(model)
    async with router_world(model, verify, draft, verify_lost_seconds=0.3) as world:
        world.verify_simulator.trouble.delay_seconds = 0.05
        call = world.stub.Generate(generation_pb2.GenerateRequest(**request(max_tokens=400)))
        assert (await call.read()).HasField("chunk")
        await world.verify.stop()
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await collect(call)
        assert failure.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "not back after 0.3 s" in failure.value.details()
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await world.generate(**request())
        assert failure.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_without_a_draft_address_rounds_are_root_only(model: Path) -> None:
    verify, draft = simulated_peers(model)
    async with router_world(model, verify, draft, with_draft=False) as world:
        answer = await world.generate(**request())
        check(answer, PROMPT, 40)
        assert answer.completion.speculation.num_accepted == 0
        assert verify.simulator.num_feature_bytes == 0


async def test_an_absent_draft_does_not_keep_the_router_from_serving(model: Path) -> None:
    verify, draft = simulated_peers(model)
    async with router_world(
        model, verify, draft, start_draft=False, draft_wait_seconds=0.2
    ) as world:
        check(await world.generate(**request()), PROMPT, 40)
        info = await world.stub.GetServerInfo(generation_pb2.GetServerInfoRequest())
        ready = {peer.role: peer.ready for peer in info.peers}
        assert ready == {"verify": True, "draft": False}


async def test_an_eviction_costs_speculation_for_a_while(world: World) -> None:
    world.verify_simulator.trouble.delay_seconds = 0.02  # so that the eviction comes in its midst
    call = world.stub.Generate(generation_pb2.GenerateRequest(**request(max_tokens=300)))
    running = asyncio.create_task(collect(call))
    await asyncio.sleep(0.1)
    world.draft_simulator.outbox.put_nowait(world.draft_simulator.toy.evict())
    answer = await running
    check(answer, PROMPT, 300)
    assert 1 <= answer.completion.speculation.num_root_only_rounds < 60
    assert world.draft_simulator.toy.num_trees > 10


# -- the client


async def test_a_cancelled_call_frees_both_services(world: World) -> None:
    world.verify_simulator.trouble.delay_seconds = 0.02
    call = world.stub.Generate(generation_pb2.GenerateRequest(**request(max_tokens=400)))
    assert (await call.read()).HasField("chunk")
    assert world.verify_simulator.toy.sequences
    call.cancel()
    await until(lambda: not world.verify_simulator.toy.sequences)
    await until(lambda: not world.draft_simulator.toy.sequences)
    load = await world.stub.GetLoad(generation_pb2.GetLoadRequest())
    assert load.num_running == 0


async def test_a_deadline_frees_both_services(world: World) -> None:
    world.verify_simulator.trouble.delay_seconds = 0.05
    call = world.stub.Generate(
        generation_pb2.GenerateRequest(**request(max_tokens=400)), timeout=0.3
    )
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await collect(call)
    assert failure.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: not world.verify_simulator.toy.sequences)
    await until(lambda: not world.draft_simulator.toy.sequences)


async def test_abort_ends_with_what_there_is(world: World) -> None:
    world.verify_simulator.trouble.delay_seconds = 0.02
    call = world.stub.Generate(
        generation_pb2.GenerateRequest(**request(max_tokens=400, request_id="mine"))
    )
    first = await call.read()
    assert (await world.stub.Abort(generation_pb2.AbortRequest(request_id="mine"))).aborted
    answer = await collect(call)
    assert answer.completion.finish_reason == generation_pb2.FINISH_REASON_ABORTED
    tokens = [*first.chunk.token_ids, *answer.token_ids]
    assert tokens == continuation(PROMPT, len(tokens))
    assert not (await world.stub.Abort(generation_pb2.AbortRequest(request_id="mine"))).aborted
    await until(lambda: not world.verify_simulator.toy.sequences)


async def test_a_slow_client_pauses_only_its_own_sequence(model: Path) -> None:
    verify, draft = simulated_peers(model)
    async with router_world(model, verify, draft, max_unread_tokens=8) as world:
        core = world.service.core
        slow = await core.open(
            generation_pb2.GenerateRequest(**request(max_tokens=400, request_id="slow"))
        )
        check(await world.generate(**request(max_tokens=200)), PROMPT, 200)
        machine = slow.sessions[0].machine
        assert machine.paused
        assert 8 <= machine.num_emitted < 40
        tokens: list[int] = []
        while True:
            response = await slow.next_response()
            if response.HasField("completion"):
                break
            tokens += response.chunk.token_ids
        assert tokens == expected(PROMPT, 400)
