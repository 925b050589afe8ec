"""The life of the three processes: refusals, health, metrics, memory, cancels, drain."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from canopy.client import Client
from canopy.results import Chunk, Completion, Message, Options
from canopy.stack import Child, Stack, StackSettings
from common.server import LIVENESS
from tests.e2e.conftest import wait_until
from tests.e2e.metrics import read_metric

pytestmark = pytest.mark.e2e

QUESTION = [Message("user", "Why does bread rise?")]
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICES = {
    "router": "canopy.v1.GenerationService",
    "draft": "canopy.v1.DraftService",
    "verify": "canopy.v1.VerifyService",
}


def refusal(*arguments: str, code: int = 1) -> str:
    """The one line with which a service refuses to start."""
    result = subprocess.run(
        [sys.executable, "-m", "canopy", "serve", *arguments, "--metrics-port", "0"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == code, result.stderr
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    return lines[0]


def health_of(address: str, name: str = "") -> int:
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=10).status


# -- refusals to start


def test_missing_model_is_one_line(tmp_path: Path, head: Path) -> None:
    missing = str(tmp_path / "none")
    for arguments in (
        ("verify", "--model", missing, "--port", "0"),
        ("draft", "--head", str(head), "--target", missing, "--port", "0"),
        ("router", "--model", missing, "--verify", "127.0.0.1:1", "--port", "0"),
    ):
        line = refusal(*arguments)
        assert line.startswith(f"canopy serve {arguments[0]}: ")
        assert missing in line
    line = refusal("draft", "--head", str(head), "--port", "0")
    assert line.startswith("canopy serve draft: target: not set")


def test_truncated_weights_are_one_line(tmp_path: Path, model: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in model.iterdir():
        if file.suffix == ".json":
            shutil.copyfile(file, broken / file.name)
    with (model / "model.safetensors").open("rb") as whole:
        (broken / "model.safetensors").write_bytes(whole.read(1 << 20))
    assert "model.safetensors" in refusal("verify", "--model", str(broken), "--port", "0")


def test_head_that_does_not_fit_is_one_line(tmp_path: Path, model: Path, head: Path) -> None:
    other = tmp_path / "head"
    shutil.copytree(head, other)
    config = json.loads((other / "config.json").read_text())
    config["hidden_size"] = 512
    (other / "config.json").write_text(json.dumps(config))
    line = refusal("draft", "--head", str(other), "--target", str(model), "--port", "0")
    assert str(other) in line


def test_port_in_use_is_one_line(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        line = refusal("router", "--model", str(model), "--verify", "127.0.0.1:1", "--port", port)
    assert f"port: cannot listen on 127.0.0.1:{port}" in line
    assert "--port" in line


def test_bad_setting_is_one_line(model: Path) -> None:
    line = refusal("verify", "--model", str(model), "--max-sequences", "0", code=2)
    assert "max_sequences: '0'" in line


# -- the running three


@pytest.mark.parametrize("service", SERVICES)
def test_health_says_serving_for_each_name(stack: Stack, service: str) -> None:
    address = stack.children[service].address
    assert health_of(address) == SERVING
    assert health_of(address, SERVICES[service]) == SERVING
    with pytest.raises(grpc.RpcError) as caught:
        health_of(address, "canopy.v1.Nothing")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("service", SERVICES)
def test_reflection_lists_the_service(stack: Stack, service: str) -> None:
    with grpc.insecure_channel(stack.children[service].address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        (response,) = stub.ServerReflectionInfo(iter([request]), timeout=10)
    assert SERVICES[service] in {s.name for s in response.list_services_response.service}


@pytest.mark.parametrize("service", SERVICES)
def test_metrics_are_there_to_scrape(stack: Stack, client: Client, service: str) -> None:
    client.generate(QUESTION, Options(max_tokens=4))
    url = f"http://{stack.children[service].metrics_address}/metrics"
    with urllib.request.urlopen(url, timeout=10) as response:
        text = response.read().decode()
    assert f"canopy_{service}_serving 1.0" in text
    assert "canopy_build_info" in text
    assert "process_resident_memory_bytes" in text


def test_verify_holds_weights_pages_and_at_most_one_gib_more(
    stack: Stack, client: Client, model: Path
) -> None:
    client.generate(QUESTION, Options(max_tokens=16))
    status = Path(f"/proc/{stack.children['verify'].process.pid}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmRSS"))
    resident = int(line.split()[1]) * 1024
    config = json.loads((model / "config.json").read_text())
    weights = (model / "model.safetensors").stat().st_size
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    row_bytes = 2 * config["num_key_value_heads"] * head_dim * 4
    pool = 8192 * config["num_hidden_layers"] * row_bytes  # the default kv_pool_tokens
    limit = weights + pool + (1 << 30)
    print(f"verify resident {resident / 2**20:.0f} MiB, limit {limit / 2**20:.0f} MiB")
    assert resident <= limit, f"{resident / 2**20:.0f} MiB"


def test_cancelled_calls_give_back_their_pages(
    client: Client, pages_settle: Callable[[], bool]
) -> None:
    for taken in range(4):
        stream = client.stream(QUESTION, Options(max_tokens=400, ignore_eos=True))
        for _ in range(taken + 1):
            next(stream)
        stream.close()  # type: ignore[attr-defined]
    assert pages_settle()


def test_expired_deadline_gives_back_its_pages(
    client: Client, pages_settle: Callable[[], bool]
) -> None:
    from canopy.results import CanopyError

    with pytest.raises(CanopyError) as caught:
        client.generate(QUESTION, Options(max_tokens=1000, ignore_eos=True), timeout_seconds=1.0)
    assert caught.value.code == "DEADLINE_EXCEEDED"
    assert pages_settle()


def test_concurrent_answers_equal_answers_alone(client: Client) -> None:
    prompts = [[Message("user", f"Name {n} animals.")] for n in (2, 3, 4, 5)]
    options = Options(max_tokens=12, token_ids=True)
    alone = [client.generate(prompt, options).token_ids for prompt in prompts]
    together: dict[int, tuple[int, ...]] = {}

    def ask(index: int) -> None:
        together[index] = client.generate(prompts[index], options).token_ids

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together[i] for i in range(len(prompts))] == alone


# -- a stack of its own, started and ended

SMALL_STEPS = ("--max-sequences=4", "--max-prefill-tokens=16", "--max-step-tokens=32")
"""Few programs: a quick start."""


@pytest.fixture(scope="module")
def own_stack(model: Path, head: Path) -> Iterator[Stack]:
    """In which no round waits for its tree, nor a step for the host. The test of SIGTERM ends
    it.
    """
    verify = (*SMALL_STEPS, "--drafting=ahead", "--async-scheduling=on")
    flags = {"verify": verify, "draft": ("--draft-ahead",)}
    with Stack(StackSettings(model=model, head=head, flags=flags, show_logs=False)) as running:
        yield running


def test_trees_ahead_change_no_token(own_stack: Stack, client: Client) -> None:
    options = Options(max_tokens=64, ignore_eos=True, token_ids=True)
    with Client(own_stack.address) as own:
        answer = own.generate(QUESTION, options)
    assert answer.token_ids == client.generate(QUESTION, options).token_ids

    def metric(service: str, name: str) -> float:
        return read_metric(own_stack.children[service].metrics_address, name)

    assert metric("draft", "canopy_draft_trees_ahead_total") > 0
    taken = metric("router", "canopy_router_ahead_rounds_total")
    assert taken > 0
    assert answer.completion.speculation.num_accepted > 0
    # Verify's are set once in a tick.
    with_nodes = 'canopy_verify_ahead_rounds_total{outcome="tree"}'
    assert wait_until(lambda: metric("verify", with_nodes) >= taken)
    assert metric("verify", 'canopy_verify_drafting{way="ahead"}') == 1


def test_sigterm_lets_the_running_answer_finish(own_stack: Stack) -> None:
    processes = [child.process for child in own_stack.children.values()]
    with Client(own_stack.address) as client:
        stream = client.stream(QUESTION, Options(max_tokens=48, ignore_eos=True, token_ids=True))
        events = [next(stream)]
        own_stack.children["router"].process.send_signal(signal.SIGTERM)
        events += list(stream)
    assert isinstance(events[-1], Completion)
    assert events[-1].num_completion_tokens == 48
    assert sum(len(e.token_ids) for e in events if isinstance(e, Chunk)) == 48
    assert own_stack.children["router"].process.wait(30) == 0
    codes = own_stack.stop()
    assert codes == {"router": 0, "draft": 0, "verify": 0}
    assert all(process.poll() is not None for process in processes)


def test_health_turns_from_not_serving_to_serving(model: Path) -> None:
    flags = ("--model", str(model), "--port", "0", "--metrics-port", "0", *SMALL_STEPS)
    child = Child("verify", flags, show_logs=False)
    try:
        deadline = time.monotonic() + 600
        child.await_event("listening", deadline)
        assert health_of(child.address) == NOT_SERVING
        assert health_of(child.address, SERVICES["verify"]) == NOT_SERVING
        assert health_of(child.address, LIVENESS) == SERVING
        child.await_event("serving", deadline)
        assert health_of(child.address, SERVICES["verify"]) == SERVING
    finally:
        child.process.send_signal(signal.SIGTERM)
        child.process.wait(60)
        child.close()
    assert child.process.returncode == 0


def test_children_end_when_their_parent_is_killed(model: Path) -> None:
    script = f"""
import time
from pathlib import Path
from canopy.stack import Child
child = Child("router", ("--model", {str(model)!r}, "--verify", "127.0.0.1:1", "--port", "0"), True)
child.await_event("listening", time.monotonic() + 60)
print(child.process.pid, flush=True)
time.sleep(600)
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert parent.stdout is not None
    with parent.stdout:
        pid = int(parent.stdout.readline())
        parent.kill()
        parent.wait()
    assert _ends(pid, 30)


def _ends(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        if "Z" in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]:
            return True  # ended; whoever adopted it has not looked yet
        time.sleep(0.1)
    return False
