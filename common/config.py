"""The base of the three services' settings: one frozen, validated object, read once at start.

Sources, later ones win: a YAML file (`--config FILE`), the environment
(`CANOPY_<SERVICE>_<FIELD>`), flags (`--field VALUE`). An unknown key in any of them is refused.
Every error is one line: the field, its value, where that came from, the limit and the remedy.

A service's schema:

    class VerifyConfig(ServiceConfig):
        SERVICE: ClassVar[str] = "verify"
        port: int = Field(50052, ge=0, le=65535, description="Port; 0 picks a free one.")
        model: Path = Field(description="Directory with config.json and safetensors.")

    config = VerifyConfig.load(argv)     # raises ConfigError; `--help` exits with 0

Lists are written `1,2,3` in the environment and in flags. Constructing the class itself reads
nothing but its keyword arguments.
"""

from __future__ import annotations

import argparse
import difflib
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NoReturn, Self, get_args, get_origin

import yaml
from pydantic import BeforeValidator, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticUndefined
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    YamlConfigSettingsSource,
)

from common.errors import ConfigError
from common.log import LogFormat, LogLevel
from common.security import ServerTls


def _split_commas(value: object) -> object:
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


type_of_list = BeforeValidator(_split_commas)
IntList = Annotated[tuple[int, ...], NoDecode, type_of_list]
StrList = Annotated[tuple[str, ...], NoDecode, type_of_list]
"""Written `a,b,c` in flags and environment, as a list in YAML."""


SERVICES = ("ROUTER", "DRAFT", "VERIFY")
"""As they stand in the names of environment variables."""


class ServiceConfig(BaseSettings):
    """Settings that every service has."""

    SERVICE: ClassVar[str]

    model_config = SettingsConfigDict(frozen=True, extra="forbid", validate_default=True)

    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(0, ge=0, le=65535, description="Port to listen on; 0 picks a free one.")
    metrics_port: int = Field(
        0, ge=0, le=65535, description="Port of the Prometheus endpoint; 0 picks a free one."
    )
    reflection: bool = Field(True, description="Let clients list the API (gRPC reflection).")
    max_message_bytes: int = Field(
        16 << 20, ge=4096, le=1 << 30, description="Largest gRPC message taken or sent."
    )
    tls_cert: Path | None = Field(
        None, description="PEM file with the server's certificate; with --tls-key: TLS only."
    )
    tls_key: Path | None = Field(None, description="PEM file with the certificate's key.")
    tls_client_ca: Path | None = Field(
        None, description="PEM file; callers must show a certificate of this authority (mTLS)."
    )
    token_file: Path | None = Field(
        None, description="File of bearer tokens, one a line; calls must carry one of them."
    )
    trace_endpoint: str = Field(
        "", description="OTLP collector for spans, HOST:PORT or URL (extra otel); empty: no spans."
    )
    drain_seconds: float = Field(
        20.0, ge=0, le=3600, description="Time after SIGTERM in which running work may finish."
    )
    log_format: LogFormat = Field("text", description="json or text.")
    log_level: LogLevel = Field("info", description="debug, info, warning or error.")
    parent_pid: int = Field(
        0, ge=0, description="End when this process is no longer the parent; 0 switches it off."
    )

    @model_validator(mode="after")
    def _tls_is_whole(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert: certificate and key go together; give --tls-key, too")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("tls_client_ca: given without --tls-cert and --tls-key")
        return self

    @property
    def tls(self) -> ServerTls | None:
        if self.tls_cert is None or self.tls_key is None:
            return None
        return ServerTls(cert=self.tls_cert, key=self.tls_key, client_ca=self.tls_client_ca)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Keyword arguments alone; `load` reads file and environment, explicitly and once."""
        return (init_settings,)

    @classmethod
    def env_prefix(cls) -> str:
        return f"CANOPY_{cls.SERVICE.upper()}_"

    @classmethod
    def load(
        cls,
        argv: Sequence[str] | None = None,
        environ: Mapping[str, str] | None = None,
        program: str | None = None,
    ) -> Self:
        """The settings from flags, environment and file. Raises ConfigError.

        `argv` without the program's name; None: sys.argv. `environ` None: the process's own.
        """
        flags = vars(cls._parser(program or f"canopy serve {cls.SERVICE}").parse_args(argv))
        file = flags.pop("config", None)
        environ = os.environ if environ is None else environ
        env = _environment_values(cls, environ)
        sources: list[tuple[str, dict[str, Any]]] = [
            ("LeaderWorkerSet", cls.values_of_orchestrator(environ)),
            (f"file {file}", _file_values(cls, file) if file else {}),
            ("environment", env),
            ("flag", flags),
        ]
        values: dict[str, Any] = {}
        origins: dict[str, str] = {}
        for origin, source in sources:
            values.update(source)
            origins.update(dict.fromkeys(source, origin))
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ConfigError(_one_line(cls, error, origins)) from None

    @classmethod
    def values_of_orchestrator(cls, environ: Mapping[str, str]) -> dict[str, Any]:
        """What the environment says under names that are not ours; any other source wins."""
        return {}

    @classmethod
    def _parser(cls, program: str) -> argparse.ArgumentParser:
        parser = _Parser(
            prog=program,
            description=(cls.__doc__ or "").strip().splitlines()[0],
            epilog=f"Flags can also be set as {cls.env_prefix()}<FLAG> or in the --config file.",
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
        )
        parser.add_argument("--config", metavar="FILE", help="YAML file of settings.")
        for name, field in cls.model_fields.items():
            flag = "--" + name.replace("_", "-")
            text = _help_of(field)
            if field.annotation is bool:
                parser.add_argument(
                    flag, dest=name, action=argparse.BooleanOptionalAction, help=text
                )
            else:
                parser.add_argument(flag, dest=name, metavar="VALUE", help=text)
        return parser


class _Parser(argparse.ArgumentParser):
    """Raises ConfigError where argparse would print its usage and exit."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; `{self.prog} --help` lists the flags")


def _help_of(field: FieldInfo) -> str:
    text = (field.description or "").replace("%", "%%")
    if get_origin(field.annotation) is Literal:
        choices = [choice for choice in get_args(field.annotation) if choice]
        if not all(choice in text for choice in choices):
            text += f" One of {', '.join(choices)}."
    if field.default is PydanticUndefined:
        return f"{text} Required."
    if field.default is None or field.default == ():
        return text
    return f"{text} Default: {field.default}.".replace("%%", "%").replace("%", "%%")


def _file_values(cls: type[ServiceConfig], file: str) -> dict[str, Any]:
    path = Path(file)
    if not path.is_file():
        raise ConfigError(f"config: no file {file}; give a YAML file of {cls.SERVICE} settings")
    try:
        text = path.read_text(encoding="utf-8")
        twice = _named_twice(text)
        values = YamlConfigSettingsSource(cls, yaml_file=path)()
    except (yaml.YAMLError, ValueError, TypeError, OSError) as error:
        raise ConfigError(f"config: {file} is not a YAML mapping of settings: {error}") from None
    if twice:
        raise ConfigError(
            f"config: {file} sets {', '.join(twice)} more than once; keep one of each"
        )
    return values


def _named_twice(text: str) -> list[str]:
    """Keys that come again on the top level: YAML takes the last, and nobody sees it."""
    root = yaml.compose(text, yaml.SafeLoader)
    keys = [key.value for key, _ in root.value] if isinstance(root, yaml.MappingNode) else []
    return sorted({str(key) for key in keys if keys.count(key) > 1})


def _environment_values(cls: type[ServiceConfig], environ: Mapping[str, str]) -> dict[str, Any]:
    """The fields that `environ` sets. Raises ConfigError for a name that is no field, and for one
    that is near to a service's names and none of them.
    """
    prefix = cls.env_prefix()
    for name in environ:
        if name.startswith("CANOPY_"):
            _check_service(name)
        field = name[len(prefix) :].lower()
        if name.startswith(prefix) and field not in cls.model_fields:
            known = (f"{prefix}{known.upper()}" for known in cls.model_fields)
            raise ConfigError(f"{name}: no such setting; {_nearest(name, known)}")
    source = EnvSettingsSource(cls, env_prefix=prefix, case_sensitive=False)
    source.env_vars = {
        name.lower(): value for name, value in environ.items() if name.startswith(prefix)
    }
    return source()


def _check_service(variable: str) -> None:
    """Names of another meaning, as those that an orchestrator sets, are nobody's mistake."""
    service = variable.removeprefix("CANOPY_").partition("_")[0]
    near = difflib.get_close_matches(service, SERVICES, n=1, cutoff=0.7)
    if near and service not in SERVICES:
        meant = variable.replace(service, near[0], 1)
        raise ConfigError(
            f"{variable}: no service is named {service.lower()}; did you mean {meant}?"
        )


def _one_line(cls: type[ServiceConfig], error: ValidationError, origins: Mapping[str, str]) -> str:
    return "; ".join(_describe(cls, detail, origins) for detail in error.errors())


def _describe(cls: type[ServiceConfig], detail: ErrorDetails, origins: Mapping[str, str]) -> str:
    """`max_sequences: 0 is less than 1 (flag); set --max-sequences to at least 1`."""
    name = str(detail["loc"][0]) if detail["loc"] else ""
    flag = "--" + name.replace("_", "-")
    variable = f"{cls.env_prefix()}{name.upper()}"
    origin = f" ({origins[name]})" if name in origins else ""
    match detail["type"]:
        case "missing":
            text = getattr(cls.model_fields.get(name), "description", None) or "required"
            return f"{name}: not set; give {flag} or {variable} ({text.rstrip('.')})"
        case "extra_forbidden":
            return f"{name}: no such setting{origin}; {_nearest(name, cls.model_fields)}"
        case "value_error":  # a validator of ours, whose message has limit and remedy
            message = detail["msg"].removeprefix("Value error, ")
            return f"{name}: {message}{origin}" if name else message
        case _:
            rule = detail["msg"].removeprefix("Input should be ")
            return f"{name}: {detail['input']!r}{origin} must be {rule}; set {flag} or {variable}"


def _nearest(name: str, known: Iterable[str]) -> str:
    matches = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {matches[0]}?" if matches else "see --help for the settings"
