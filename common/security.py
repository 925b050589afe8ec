"""TLS and bearer tokens, for servers and for those who call them; files are read anew when changed.

A server with `tls_cert` and `tls_key` speaks TLS only; with `tls_client_ca` it also wants a
certificate of its callers (mTLS). With `token_file` every call but health's must carry one of the
file's tokens. Renewed certificates and tokens take effect with the next connection and call; a file
that is broken at that moment changes nothing and is logged.
"""

from __future__ import annotations

import hashlib
import hmac
import ssl
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from common.errors import StartupError
from common.log import get_logger

_logger = get_logger("common.security")

AUTHORIZATION = "authorization"
MIN_TOKEN_CHARACTERS = 16
_OPEN_TO_ALL = "/grpc.health.v1.Health/"
"""Probes of an orchestrator carry no token."""

Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTls:
    """A server's files. `client_ca`: callers need a certificate of it."""

    cert: Path
    key: Path
    client_ca: Path | None = None

    def credentials(self) -> grpc.ServerCredentials:
        """Raises StartupError naming the file that cannot be used."""
        _check_pair(self.cert, self.key, "tls")
        held = Held([self.cert, self.key, *([self.client_ca] if self.client_ca else [])])
        present = self._configuration()

        def fetch() -> grpc.ServerCertificateConfiguration:
            """On each new connection."""
            nonlocal present
            if held.changed():
                present = self._renewed() or present
            return present

        return grpc.dynamic_ssl_server_credentials(present, fetch, self.client_ca is not None)

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        ca = None
        if self.client_ca is not None:
            ca = _read_authority(self.client_ca, "tls_client_ca")
        pair = (_read(self.key, "tls_key"), _read(self.cert, "tls_cert"))
        return grpc.ssl_server_certificate_configuration([pair], root_certificates=ca)

    def _renewed(self) -> grpc.ServerCertificateConfiguration | None:
        """None: the files are of no use now."""
        try:
            _check_pair(self.cert, self.key, "tls")
            configuration = self._configuration()
        except StartupError as error:
            _logger.warning("certificate not renewed", reason=str(error))
            return None
        _logger.info("certificate renewed", file=str(self.cert))
        return configuration


@dataclass(frozen=True, slots=True, kw_only=True)
class CallerSecurity:
    """What a caller shows and trusts. `ca` None: no TLS. Files are read with each new channel.

    `server_name`: what the server's certificate must be for; empty: the host that is called.
    """

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    token_file: Path | None = None
    server_name: str = ""

    def check(self, prefix: str) -> None:
        """Raises StartupError for what cannot be used. `prefix`: of the settings' names."""
        if self.cert is not None or self.key is not None:
            if self.ca is None:
                raise StartupError(f"{prefix}cert: given without {prefix}ca; both are needed")
            if self.cert is None or self.key is None:
                raise StartupError(f"{prefix}cert: certificate and key go together; give both")
            _check_pair(self.cert, self.key, prefix.rstrip("_"))
        if self.ca is not None:
            _read_authority(self.ca, f"{prefix}ca")
        if self.token_file is not None:
            read_tokens(self.token_file)

    @property
    def credentials(self) -> grpc.ChannelCredentials | None:
        """Raises StartupError if a file cannot be read now."""
        if self.ca is None:
            return None
        key = None if self.key is None else _read(self.key, "key")
        cert = None if self.cert is None else _read(self.cert, "cert")
        return grpc.ssl_channel_credentials(_read_authority(self.ca, "ca"), key, cert)

    @property
    def metadata(self) -> Metadata:
        """Of every call; the first token of the file."""
        if self.token_file is None:
            return ()
        return ((AUTHORIZATION, f"Bearer {read_tokens(self.token_file)[0]}"),)

    @property
    def options(self) -> list[tuple[str, Any]]:
        """Of a channel with TLS."""
        return [("grpc.ssl_target_name_override", self.server_name)] if self.server_name else []


def aio_channel(
    address: str, security: CallerSecurity, options: Sequence[tuple[str, Any]]
) -> grpc.aio.Channel:
    credentials = security.credentials
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, credentials, options=[*options, *security.options])


def sync_channel(
    address: str, security: CallerSecurity, options: Sequence[tuple[str, Any]]
) -> grpc.Channel:
    credentials = security.credentials
    if credentials is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, credentials, options=[*options, *security.options])


def read_tokens(file: Path) -> list[str]:
    """Of `read_named_tokens`, the tokens alone."""
    return list(read_named_tokens(file))


def read_named_tokens(file: Path) -> dict[str, str]:
    """Tokens and whose they are: a line is `TOKEN` or `TOKEN NAME`, and several tokens may have one
    name; empty lines and those that begin with # are left out. Raises StartupError.
    """
    text = _read(file, "token_file").decode(errors="replace")
    lines = (line.split() for line in text.splitlines())
    named = [line for line in lines if line and not line[0].startswith("#")]
    if not named:
        raise StartupError(f"token_file: {file} has no token; write one a line")
    for token, *names in named:
        if len(token) < MIN_TOKEN_CHARACTERS or not _is_token(token):
            raise StartupError(
                f"token_file: a token in {file} is shorter than {MIN_TOKEN_CHARACTERS} characters"
                " or not plain ASCII without spaces; make one with `openssl rand -hex 32`"
            )
        if len(names) > 1 or not all(map(_is_token, names)):
            raise StartupError(
                f"token_file: a line of {file} has more than a token and a name of plain ASCII;"
                " write TOKEN NAME"
            )
    return {token: "".join(names) for token, *names in named}


def as_text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode(errors="replace")


def shown_digest(authorization: str) -> bytes:
    """Of the bearer token in this metadata; empty without one."""
    scheme, _, token = authorization.partition(" ")
    return token_digest(token) if scheme.lower() == "bearer" else b""


def token_digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


class RequireToken(grpc.aio.ServerInterceptor):
    """Answers UNAUTHENTICATED to calls without one of the tokens in `file`."""

    def __init__(self, file: Path) -> None:
        """Raises StartupError."""
        self._file = file
        self._held = Held([file])
        self._digests = token_digests(read_tokens(file))

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(_OPEN_TO_ALL):
            return handler
        if self._accepts(dict(handler_call_details.invocation_metadata or ())):
            return handler
        message = "authorization: send `Bearer TOKEN` with a token of this server"
        return refusing(handler, grpc.StatusCode.UNAUTHENTICATED, message)

    def _accepts(self, metadata: dict[str, str | bytes]) -> bool:
        """Compares with every token, in a time that does not depend on how much is right."""
        if self._held.changed():
            try:
                self._digests = token_digests(read_tokens(self._file))
            except StartupError as error:
                _logger.warning("tokens not renewed", reason=str(error))
        shown = shown_digest(as_text(metadata.get(AUTHORIZATION, "")))
        matches = [hmac.compare_digest(shown, digest) for digest in self._digests]
        return any(matches)


def refusing(
    handler: grpc.RpcMethodHandler[Any, Any], code: grpc.StatusCode, message: str
) -> grpc.RpcMethodHandler[Any, Any]:
    """A handler of the same kind as `handler` that aborts each call."""
    kind = ("stream" if handler.request_streaming else "unary") + (
        "_stream" if handler.response_streaming else "_unary"
    )

    async def refuse(request: object, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        await context.abort(code, message)

    make = getattr(grpc, f"{kind}_rpc_method_handler")
    made: grpc.RpcMethodHandler[Any, Any] = make(refuse)
    return made


class Held:
    """Whether files have changed since they were last asked about."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files
        self._seen = self._look()

    def changed(self) -> bool:
        now = self._look()
        changed, self._seen = now != self._seen, now
        return changed

    def _look(self) -> list[tuple[int, int] | None]:
        looks: list[tuple[int, int] | None] = []
        for file in self._files:
            try:
                status = file.stat()
                looks.append((status.st_mtime_ns, status.st_ino))
            except OSError:
                looks.append(None)
        return looks


def _is_token(token: str) -> bool:
    return token.isascii() and token.isprintable() and " " not in token


def token_digests(tokens: Sequence[str]) -> list[bytes]:
    return [token_digest(token) for token in tokens]


def _read(file: Path, field: str) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise StartupError(f"{field}: cannot read {file} ({error.strerror})") from None


def _read_authority(file: Path, field: str) -> bytes:
    """Raises StartupError unless the file holds a certificate."""
    data = _read(file, field)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(
            cadata=data.decode("ascii", errors="replace")
        )
    except (ssl.SSLError, ValueError):
        raise StartupError(
            f"{field}: {file} holds no certificate; give the PEM file of the authority that signed"
            " the other side's"
        ) from None
    return data


def _check_pair(cert: Path, key: Path, field: str) -> None:
    """Raises StartupError unless the key belongs to the certificate."""
    for file, name in ((cert, f"{field}_cert"), (key, f"{field}_key")):
        _read(file, name)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password="")
    except (ssl.SSLError, OSError) as error:
        reason = getattr(error, "reason", None) or str(error)
        raise StartupError(
            f"{field}_cert: {cert} and {key} are no certificate and its key ({reason}); give PEM"
            " files that belong together, the key without a password"
        ) from None
