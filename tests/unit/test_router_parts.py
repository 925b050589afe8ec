"""Tokenizer directory, chat template, trees, statistics, configuration: literals."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from datetime import datetime
from pathlib import Path

import pytest

from benchmarks.router_parts import measure_rounds
from canopy.v1 import draft_pb2, types_pb2, verify_pb2
from common.errors import ConfigError, StartupError
from common.types import TreeShape
from draft_service.config import DraftConfig
from router.chat import ChatTemplate, ChatTemplateError
from router.config import RouterConfig
from router.handshake import served
from router.messages import RoundResult
from router.prompts import encode
from router.requests import Prompt
from router.statistics import Clock, RoundStatistics
from router.tokenizer import ModelTokenizer
from router.trees import Tree
from tests.unit.router_tiny import CHAT_TEMPLATE, EOS, IM_END, write_model

# -- tokenizer


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_model(tmp_path / "toy")


def test_the_directory_is_read_whole(directory: Path) -> None:
    tokenizer = ModelTokenizer(directory)
    raw = (directory / "tokenizer.json").read_bytes()
    assert tokenizer.tokenizer_hash == hashlib.sha256(raw).hexdigest()
    assert tokenizer.vocab_size == 300
    assert tokenizer.stop_token_ids == (EOS, IM_END)
    assert tokenizer.decode(tokenizer.encode("the hello é")) == "the hello é"
    assert tokenizer.token_text(IM_END) == "<|im_end|>"


def test_stop_tokens_fall_back_to_config_json(directory: Path) -> None:
    (directory / "generation_config.json").unlink()
    assert ModelTokenizer(directory).stop_token_ids == (EOS,)
    (directory / "config.json").write_text("{}")
    assert ModelTokenizer(directory).stop_token_ids == ()


def test_truncation_in_the_file_does_not_cut_prompts(directory: Path) -> None:
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text())
    content["truncation"] = {
        "direction": "Right",
        "max_length": 4,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    path.write_text(json.dumps(content))
    assert len(ModelTokenizer(directory).encode("abcdefgh")) == 8


def test_a_long_prompt_leaves_the_event_loop_alone(directory: Path) -> None:
    """It is encoded on a thread, which must not hold the interpreter's lock meanwhile."""
    tokenizer = ModelTokenizer(directory)
    prompt = Prompt(text="ab cd " * 100_000)

    async def longest_pause() -> tuple[float, float]:
        encoding = asyncio.create_task(encode(prompt, tokenizer, 10**6))
        started = seen = time.monotonic()
        pause = 0.0
        while not encoding.done():
            await asyncio.sleep(0.001)
            pause, seen = max(pause, time.monotonic() - seen), time.monotonic()
        await encoding
        return pause, time.monotonic() - started

    pause, total = asyncio.run(longest_pause())
    assert pause < total / 2


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer.json", None, ["cannot read", "tokenizer.json", "--model"]),
        ("tokenizer.json", "{}", ["tokenizer.json is broken", "fetch the model's files again"]),
        ("tokenizer.json", '{"version": ', ["tokenizer.json is broken"]),
        ("generation_config.json", "[1]", ["generation_config.json is broken", "JSON object"]),
        ("generation_config.json", '{"eos_token_id": "x"}', ["eos_token_id is 'x'"]),
        ("tokenizer_config.json", '{"chat_template": "{% if %}"}', ["template does not compile"]),
    ],
)
def test_a_broken_file_is_named_in_one_line(
    directory: Path, name: str, content: str | None, words: list[str]
) -> None:
    (directory / name).unlink()
    if content is not None:
        (directory / name).write_text(content)
    with pytest.raises(StartupError) as failure:
        ModelTokenizer(directory)
    assert "\n" not in str(failure.value)
    for word in words:
        assert word in str(failure.value)


def test_a_template_file_outranks_the_configured_one(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text("{{ messages[0].content }}!{{ eos_token }}")
    tokenizer = ModelTokenizer(directory)
    assert tokenizer.chat_template is not None
    assert tokenizer.chat_template.render([{"role": "user", "content": "a"}]) == "a!<|eos|>"


def test_of_several_named_templates_the_default_is_taken(tmp_path: Path) -> None:
    named = [
        {"name": "tool_use", "template": "tools"},
        {"name": "default", "template": "{{ bos_token }}x"},
    ]
    directory = write_model(tmp_path / "named", chat_template=named, bos_token={"content": "<b>"})
    template = ModelTokenizer(directory).chat_template
    assert template is not None
    assert template.render([]) == "<b>x"


def test_a_model_without_a_template_says_what_to_send(tmp_path: Path) -> None:
    tokenizer = ModelTokenizer(write_model(tmp_path / "plain", chat_template=None))
    with pytest.raises(ChatTemplateError, match="no chat template; send text or token_ids"):
        tokenizer.encode_chat([{"role": "user", "content": "a"}])


# -- chat template


def render(source: str, *messages: tuple[str, str]) -> str:
    turns = [{"role": role, "content": content} for role, content in messages]
    return ChatTemplate(source, {"bos_token": "<s>"}, lambda: datetime(2031, 5, 6)).render(turns)


def test_the_template_writes_the_assistants_header() -> None:
    assert render(CHAT_TEMPLATE, ("system", "be"), ("user", "hi")) == (
        "<|im_start|>system\nbe<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_templates_have_what_hugging_face_gives_them() -> None:
    source = (
        "{{ bos_token }}{{ strftime_now('%d %b %Y') }}"
        "{% for m in messages %}"
        "{% if loop.index0 == 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m | tojson }}{% endgeneration %}"
        "{% endfor %}"
    )
    shown = render(source, ("user", "<é&'>"), ("user", "never"))
    assert shown == '<s>06 May 2031{"role": "user", "content": "<é&\'>"}'


def test_block_lines_leave_no_blank_lines() -> None:
    assert render("  {% for m in messages %}\n{{ m.role }}\n  {% endfor %}\nx", ("u", "")) == "u\nx"


def test_a_template_may_refuse_messages() -> None:
    with pytest.raises(ChatTemplateError, match="refuses: no role wizard"):
        render(CHAT_TEMPLATE, ("wizard", "hi"))


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].role.missing.more }}",
        "{{ 1 / 0 }}",
    ],
)
def test_a_template_that_reaches_out_or_fails_is_an_error_of_its_own(source: str) -> None:
    with pytest.raises(ChatTemplateError, match="the chat template failed"):
        render(source, ("user", "x"))


# -- trees

#        0
#      1   2
#     3 5   4
#     6
TREE = Tree(
    (9, 11, 12, 13, 14, 15, 16), (0, 0, 0, 1, 2, 1, 3), (0, -0.1, -0.2, -0.3, -0.4, -0.5, -0.6)
)
DEPTHS = [0, 1, 1, 2, 2, 2, 3]


def test_depths() -> None:
    assert TREE.depths() == DEPTHS


def test_capped_by_nodes_is_a_prefix() -> None:
    assert TREE.capped(DEPTHS, 4, 9) == Tree([9, 11, 12, 13], [0, 0, 0, 1], [0, -0.1, -0.2, -0.3])


def test_capped_by_depth_renumbers_parents() -> None:
    assert TREE.capped(DEPTHS, 99, 1) == Tree([9, 11, 12], [0, 0, 0], [0, -0.1, -0.2])
    assert TREE.capped(DEPTHS, 99, 2).parents == [0, 0, 0, 1, 2, 1]
    assert TREE.capped(DEPTHS, 99, 3) is TREE
    assert TREE.capped(DEPTHS, 99, 0).tokens == [9]


@pytest.mark.parametrize(
    ("parents", "scores"),
    [((0, 1), (0, 0)), ((0, 5), (0, 0)), ((0,), (0, 0)), ((0, 0), (0,)), ((0, -1), (0, 0))],
)
def test_what_is_no_tree(parents: tuple[int, ...], scores: tuple[float, ...]) -> None:
    assert Tree((1, 2), parents, scores).depths() is None
    assert Tree((), (), ()).depths() is None


# -- statistics


def result(num_emitted: int, num_nodes: int) -> RoundResult:
    nodes = list(range(1, num_emitted))
    return RoundResult(
        b"s", 1, 0, 0, list(range(num_emitted)), [1.0] * num_emitted, num_nodes, nodes, 0.0, 0.0
    )


def test_rounds_are_counted_by_depth_and_length() -> None:
    statistics = RoundStatistics()
    statistics.add_round([0], result(1, 1), wanted_tree=False)
    statistics.add_round(DEPTHS, result(3, 7), wanted_tree=True)
    statistics.add_round(DEPTHS, result(1, 3), wanted_tree=True)  # verify used three nodes
    statistics.add_round([0], result(1, 1), wanted_tree=True)
    assert statistics.num_rounds == 4
    assert statistics.num_drafted == 6 + 2
    assert statistics.num_accepted == 2
    assert statistics.num_emitted == 6
    assert statistics.num_drafted_per_depth == [2, 1, 1]
    assert statistics.num_accepted_per_depth == [1, 1]
    assert statistics.num_emitted_histogram == [3, 0, 1]
    assert statistics.num_root_only_rounds == 1
    assert statistics.acceptance_length == pytest.approx(5 / 3)


def test_shares_of_time_add_up_to_the_whole() -> None:
    clock = Clock(started=10.0)
    clock.add_verify(waited=2.0, reported=1.5)
    clock.add_draft(waited=1.0, reported=5.0)  # a service cannot take more than was waited
    assert (clock.verify_seconds, clock.draft_seconds, clock.transport_seconds) == (1.5, 1.0, 0.5)
    assert clock.router_seconds(14.0) == 1.0


# -- configuration


def test_settings_from_flags(tmp_path: Path) -> None:
    config = RouterConfig.load(
        ["--model", str(tmp_path), "--verify", "v:1", "--tree-nodes", "9"], environ={}
    )
    assert config.default_tree.max_nodes == 9
    assert config.served_name == tmp_path.name
    assert config.draft == ()


def test_trees_that_nobody_asked_for_are_as_the_draft_has_them(tmp_path: Path) -> None:
    tokenizer = ModelTokenizer(write_model(tmp_path / "model"))
    verify = verify_pb2.GetVerifyInfoResponse(max_tree_nodes=64, max_context_len=512)
    most = types_pb2.TreeShape(max_depth=9, top_k=7, max_nodes=33)
    draft = draft_pb2.GetDraftInfoResponse(max_tree=most)
    flags = ["--model", str(tmp_path), "--verify", "v:1"]
    unset = served(RouterConfig.load(flags, environ={}), tokenizer, [verify], [draft])
    assert unset.default_tree == TreeShape(max_depth=9, top_k=7, max_nodes=33)
    narrow = RouterConfig.load([*flags, "--tree-nodes", "8"], environ={})
    given = served(narrow, tokenizer, [verify], [draft])
    assert given.default_tree == TreeShape(max_depth=9, top_k=7, max_nodes=8)
    fields = DraftConfig.model_fields
    assert TreeShape() == TreeShape(
        **{name: fields[name].default for name in ("max_depth", "top_k", "max_nodes")}
    )


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model", "m"], ["verify", "--verify", "CANOPY_ROUTER_VERIFY"]),
        (["--model", "m", "--verify", "host"], ["'host' is no address", "HOST:PORT"]),
        (["--model", "m", "--verify", "h:99999"], ["'h:99999' is no address"]),
        (["--model", "m", "--verify", ""], ["empty", "HOST:PORT"]),
        (["--model", "m", "--verify", "h:1", "--tree-nodes", "-1"], ["tree_nodes", "0"]),
        (["--model", "m", "--verify", "h:1", "--tree-seconds", "nan"], ["tree_seconds"]),
    ],
)
def test_wrong_settings_are_named(flags: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as failure:
        RouterConfig.load(flags, environ={})
    for word in words:
        assert word in str(failure.value)


# -- what the benchmarks drive


def test_the_measured_rounds_are_rounds_of_a_real_core() -> None:
    """Each part is met in every round, or the table in docs/protocol.md would be of nothing."""
    parts = asyncio.run(measure_rounds(num_sequences=3, num_rounds=4, nodes=8))
    assert set(parts) == {"results_ms", "trees_ms", "frames_ms", "chunks_ms"}
    assert all(milliseconds > 0 for milliseconds in parts.values())
