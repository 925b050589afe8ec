"""TLS, mTLS and bearer tokens: a router's process between simulated peers, every side secured."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc

from canopy.client import Client, Retry
from canopy.results import CanopyError, Chunk, Options
from canopy.stack import Child
from canopy.v1 import generation_pb2, generation_pb2_grpc
from common.errors import ConfigError, StartupError
from common.security import CallerSecurity, RequireToken, ServerTls
from router.config import RouterConfig
from tests.protocol.router_world import simulated_peers
from tests.unit.router_tiny import write_model

ONE, OTHER, PEERS = "1" * 32, "2" * 32, "3" * 32
ONCE = Retry(max_attempts=1)
OPTIONS = Options(max_tokens=8, token_ids=True)


@dataclass
class Files:
    """Of one authority: the server's and a caller's certificates, and tokens."""

    folder: Path

    def __post_init__(self) -> None:
        self.renew(trustme.CA())
        (self.folder / "tokens").write_text(f"# callers\n{ONE}\n\n{OTHER}\n")
        (self.folder / "peers").write_text(PEERS)

    def renew(self, authority: trustme.CA) -> None:
        authority.cert_pem.write_to_path(self.path("ca"))
        for name in ("server", "caller"):
            made = authority.issue_cert("127.0.0.1")
            made.private_key_pem.write_to_path(self.path(f"{name}_key"))
            made.cert_chain_pems[0].write_to_path(self.path(f"{name}_cert"))

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

    def server(self) -> ServerTls:
        names = ("server_cert", "server_key", "ca")
        cert, key, ca = (Path(self.path(name)) for name in names)
        return ServerTls(cert=cert, key=key, client_ca=ca)

    def caller(self, token: str | None = ONE, with_cert: bool = True) -> CallerSecurity:
        token_file = None
        if token is not None:
            token_file = self.folder / f"token-{token[0]}"
            token_file.write_text(token)
        return CallerSecurity(
            ca=Path(self.path("ca")),
            cert=Path(self.path("caller_cert")) if with_cert else None,
            key=Path(self.path("caller_key")) if with_cert else None,
            token_file=token_file,
        )


@pytest.fixture
def files(tmp_path: Path) -> Files:
    folder = tmp_path / "files"
    folder.mkdir()
    return Files(folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("secure") / "toy")


@asynccontextmanager
async def secured(model: Path, files: Files, delay_seconds: float = 0.0) -> AsyncIterator[str]:
    """The address of a router's process, its peers in this one."""
    hosts = simulated_peers(model)
    for host in hosts:
        host.simulator.trouble.delay_seconds = delay_seconds
        host.tls, host.token_file = files.server(), Path(files.path("peers"))
        await host.start()
    names = ("tls_cert", "tls_key", "tls_client_ca", "token_file", "peer_ca", "peer_cert",
             "peer_key", "peer_token_file")  # fmt: skip
    values = ("server_cert", "server_key", "ca", "tokens", "ca", "caller_cert", "caller_key",
              "peers")  # fmt: skip
    flags = [
        part
        for name, value in zip(names, values, strict=True)
        for part in (f"--{name.replace('_', '-')}", files.path(value))
    ]
    where = ("--verify", hosts[0].address, "--draft", hosts[1].address, "--port", "0")
    child = Child("router", ("--model", str(model), *where, *flags), show_logs=False)
    try:
        await asyncio.to_thread(child.await_event, "serving", time.monotonic() + 30)
        yield child.address
    finally:
        child.process.terminate()
        await asyncio.to_thread(child.process.wait, 30)
        child.close()
        for host in hosts:
            await host.stop()


def ask(address: str, security: CallerSecurity | None) -> str:
    """The status of one call: OK, or why not."""
    try:
        with Client(address, ONCE, security) as client:
            tokens = client.generate([104, 101], OPTIONS, timeout_seconds=10).token_ids
            return "OK" if len(tokens) == 8 else "short"
    except CanopyError as error:
        return error.code


def abort(address: str, security: CallerSecurity, request_id: str) -> bool:
    credentials = security.credentials
    assert credentials is not None
    with grpc.secure_channel(address, credentials) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        request = generation_pb2.AbortRequest(request_id=request_id)
        response = stub.Abort(request, metadata=security.metadata, timeout=10)
        return bool(response.aborted)


async def test_only_those_with_certificate_and_token_get_in(
    model: Path, files: Files, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    async with secured(model, files) as address:

        def statuses() -> Iterator[str]:
            yield ask(address, files.caller(ONE))
            yield ask(address, files.caller(OTHER))
            yield ask(address, files.caller(None))
            yield ask(address, files.caller(PEERS))
            yield ask(address, files.caller(ONE, with_cert=False))
            yield ask(address, Files(elsewhere).caller(ONE))
            yield ask(address, None)

        assert await asyncio.to_thread(lambda: list(statuses())) == [
            *("OK", "OK", "UNAUTHENTICATED", "UNAUTHENTICATED"),
            *("UNAVAILABLE", "UNAVAILABLE", "UNAVAILABLE"),
        ]

        def health() -> int:
            credentials = files.caller(None).credentials
            assert credentials is not None
            with grpc.secure_channel(address, credentials) as channel:
                stub = health_pb2_grpc.HealthStub(channel)
                return stub.Check(health_pb2.HealthCheckRequest(), timeout=10).status

        assert await asyncio.to_thread(health) == health_pb2.HealthCheckResponse.SERVING


async def test_callers_are_out_of_each_others_reach(model: Path, files: Files) -> None:
    async with secured(model, files, delay_seconds=0.05) as address:

        def scene() -> tuple[bool, str, bool]:
            """One's generation runs: another cannot abort it, may use its id, its owner can."""
            endless = Options(max_tokens=400, token_ids=True, request_id="mine", ignore_eos=True)
            with Client(address, ONCE, files.caller(ONE)) as client:
                stream = client.stream([104, 101], endless)
                assert isinstance(next(stream), Chunk)
                by_other = abort(address, files.caller(OTHER), "mine")
                with Client(address, ONCE, files.caller(OTHER)) as other:
                    same_id = Options(max_tokens=4, request_id="mine")
                    text = other.generate([104, 101], same_id).completion.request_id
                by_owner = abort(address, files.caller(ONE), "mine")
                stream.close()  # type: ignore[attr-defined]
                return by_other, text, by_owner

        assert await asyncio.to_thread(scene) == (False, "mine", True)


async def test_renewed_files_take_effect_without_a_restart(model: Path, files: Files) -> None:
    async with secured(model, files) as address:
        assert await asyncio.to_thread(ask, address, files.caller(ONE)) == "OK"
        files.write("tokens", OTHER)
        assert await asyncio.to_thread(ask, address, files.caller(ONE)) == "UNAUTHENTICATED"
        assert await asyncio.to_thread(ask, address, files.caller(OTHER)) == "OK"
        files.renew(trustme.CA())
        assert await asyncio.to_thread(ask, address, files.caller(OTHER)) == "OK"
        files.write("tokens", "short")  # broken: the tokens before stay
        files.write("server_cert", "nonsense")
        assert await asyncio.to_thread(ask, address, files.caller(OTHER)) == "OK"


def test_files_that_cannot_be_used_are_named_at_start(files: Files, model: Path) -> None:
    mixed = ServerTls(cert=Path(files.path("server_cert")), key=Path(files.path("caller_key")))
    with pytest.raises(StartupError, match=r"tls_cert: .*server_cert.* belong together"):
        mixed.credentials()
    files.write("tokens", "# none\n")
    with pytest.raises(StartupError, match=r"token_file: .* has no token"):
        RequireToken(Path(files.path("tokens")))
    files.write("tokens", "short")
    with pytest.raises(StartupError, match="shorter than 16") as caught:
        RequireToken(Path(files.path("tokens")))
    assert "'short'" not in str(caught.value)
    flags = ["--model", str(model), "--verify", "v:1", "--tls-cert", "x"]
    with pytest.raises(ConfigError, match="tls_cert: certificate and key go together"):
        RouterConfig.load(flags, environ={})
    with pytest.raises(StartupError, match="peer_ca: cannot read"):
        CallerSecurity(ca=Path("/nowhere/ca")).check("peer_")


def test_a_file_without_a_certificate_is_no_authority(files: Files, model: Path) -> None:
    files.write("empty", "-----no certificate in here-----\n")
    empty = Path(files.path("empty"))
    message = r"holds no certificate; give the PEM file"
    with pytest.raises(StartupError, match=f"tls_ca: .*empty {message}"):
        CallerSecurity(ca=empty).check("tls_")
    mtls = ServerTls(
        cert=Path(files.path("server_cert")), key=Path(files.path("server_key")), client_ca=empty
    )
    with pytest.raises(StartupError, match=f"tls_client_ca: .*empty {message}"):
        mtls.credentials()
