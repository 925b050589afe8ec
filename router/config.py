"""The router's settings."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import ClassVar

from pydantic import Field, field_validator

from common.config import ServiceConfig, StrList
from common.security import CallerSecurity
from common.types import TreeShape
from router.names import is_address
from router.tenants import TenantLimits, parse_own

_METADATA_KEY = re.compile(r"[a-z0-9_.-]+(?<!-bin)")


class RouterConfig(ServiceConfig):
    """Settings of the router: the public API, between clients, draft and verify."""

    SERVICE: ClassVar[str] = "router"

    port: int = Field(50051, ge=0, le=65535, description="Port to listen on; 0 picks a free one.")
    model: Path = Field(
        description="Directory with the target's tokenizer.json and config.json; no weights."
    )
    model_name: str = Field("", description="Name that clients ask for; empty: the directory's.")
    verify: StrList = Field(
        description="Addresses of the verify replicas, with commas between: HOST:PORT is one,"
        " dns:HOST:PORT is every address that the name has."
    )
    draft: StrList = Field(
        (),
        description="Addresses of the draft replicas, as --verify; none: root-only decoding.",
    )
    peer_ca: Path | None = Field(
        None, description="PEM file of the authority of verify's and draft's certificates: TLS."
    )
    peer_cert: Path | None = Field(
        None, description="PEM file with the certificate that the router shows them (mTLS)."
    )
    peer_key: Path | None = Field(None, description="PEM file with that certificate's key.")
    peer_token_file: Path | None = Field(
        None, description="File whose first line is the bearer token for verify and draft."
    )
    max_running: int = Field(
        256, ge=1, le=65536, description="Generations at once; more are refused for now."
    )
    max_choices: int = Field(
        8, ge=1, le=256, description="Most choices (n) of one request; each is a generation."
    )
    tenant_max_running: int = Field(
        0, ge=0, le=65536, description="Generations at once of one caller; 0: no limit."
    )
    tenant_max_running_of: StrList = Field(
        (), description="Other limits for some callers, by name: NAME=NUMBER, commas between."
    )
    tenant_queue_share: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Part of max_running that one caller's generations without a first token may"
        " take.",
    )
    tenant_header: str = Field(
        "", description="Metadata key in which a trusted gateway names the caller; empty: none."
    )
    max_total_tokens: int = Field(
        0, ge=0, description="Most tokens of prompt and answer; 0: as many as verify holds."
    )
    default_max_tokens: int = Field(
        512, ge=1, description="Tokens to generate where a request says nothing."
    )
    resolve_seconds: float = Field(
        5.0, gt=0, le=3600, description="How often names (dns:HOST:PORT) are asked for replicas."
    )
    affinity_weight: float = Field(
        2.0,
        ge=0,
        le=1000,
        description="Tokens of load that a verify may have more than the least loaded one for each"
        " prompt token that it has seen already; 0: placement by load and pages alone.",
    )
    tree_depth: int = Field(
        0, ge=0, le=64, description="Depth of trees, unless asked; 0: the draft's."
    )
    tree_top_k: int = Field(
        0, ge=0, le=64, description="Children considered per node, unless asked; 0: the draft's."
    )
    tree_nodes: int = Field(
        0, ge=0, le=256, description="Nodes of a tree with its root, unless asked; 0: the draft's."
    )
    tree_seconds: float = Field(
        0.5, gt=0, le=60, description="Wait for a tree before a round goes without one."
    )
    catch_up_tokens: int = Field(
        2048, ge=1, description="How far back a draft begins that is opened in mid-generation."
    )
    max_unread_tokens: int = Field(
        256, ge=1, le=1 << 20, description="Tokens kept for a slow client before it is paused."
    )
    verify_lost_seconds: float = Field(
        30.0, gt=0, le=3600, description="Running generations wait this long for a lost verify."
    )
    fail_over_seconds: float = Field(
        0.5,
        ge=0,
        le=3600,
        description="Time for a lost verify to be back before another replica takes over.",
    )
    silence_seconds: float = Field(
        6.0,
        ge=0.2,
        le=3600,
        description="A replica that answers no ping for so long is lost; one whose process died is"
        " so at once.",
    )
    draft_wait_seconds: float = Field(
        60.0, ge=0, le=3600, description="At start, wait this long for the draft, then go without."
    )

    @field_validator("verify", "draft")
    @classmethod
    def _are_addresses(cls, addresses: tuple[str, ...]) -> tuple[str, ...]:
        for address in addresses:
            if not is_address(address):
                raise ValueError(f"{address!r} is no address; give HOST:PORT or dns:HOST:PORT")
            if addresses.count(address) > 1:
                raise ValueError(f"{address!r} is there twice; name each replica once")
        return addresses

    @field_validator("verify")
    @classmethod
    def _is_set(cls, addresses: tuple[str, ...]) -> tuple[str, ...]:
        if not addresses:
            raise ValueError("empty; give the verify service's HOST:PORT")
        return addresses

    @field_validator("tenant_max_running_of")
    @classmethod
    def _are_limits(cls, limits: tuple[str, ...]) -> tuple[str, ...]:
        parse_own(limits)
        return limits

    @field_validator("tenant_header")
    @classmethod
    def _is_metadata_key(cls, header: str) -> str:
        if header and not _METADATA_KEY.fullmatch(header):
            raise ValueError(f"{header!r} is no metadata key; use a-z, 0-9, '-', '_' and '.'")
        return header

    @property
    def tenant_limits(self) -> TenantLimits:
        share = self.tenant_queue_share
        return TenantLimits(
            max_running=self.tenant_max_running,
            own=parse_own(self.tenant_max_running_of),
            max_waiting=math.ceil(share * self.max_running) if share < 1 else 0,
        )

    @property
    def peer_security(self) -> CallerSecurity:
        return CallerSecurity(
            ca=self.peer_ca,
            cert=self.peer_cert,
            key=self.peer_key,
            token_file=self.peer_token_file,
        )

    @property
    def default_tree(self) -> TreeShape:
        """Zeros: as the draft has it."""
        return TreeShape(
            max_depth=self.tree_depth, top_k=self.tree_top_k, max_nodes=self.tree_nodes
        )

    @property
    def served_name(self) -> str:
        return self.model_name or self.model.resolve().name
