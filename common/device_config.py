"""Settings that the two services with a device share: the device, and the hosts of a slice.

A slice of several hosts is one service in as many processes, one a host. All are started with the
same settings but for `host_id`; host 0, the leader, serves gRPC, and the others follow its steps
(common/group.py). In a LeaderWorkerSet on Kubernetes the three settings of the group come from the
variables that its controller sets: LWS_LEADER_ADDRESS, LWS_GROUP_SIZE and LWS_WORKER_INDEX.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from common.config import ServiceConfig

LWS_GROUP_PORT = 8480
"""The leader's in a LeaderWorkerSet; jax's coordinator takes the next one. The TPU runtime itself
uses 8471 and 8476."""


class DeviceConfig(ServiceConfig):
    """Settings of a service that runs a model on devices."""

    platform: Literal["cpu", "gpu", "tpu"] = Field("cpu", description="Where the model runs.")
    chip: str = Field("", description="TPU generation, as v5e; required on TPU.")
    tensor_parallel: int = Field(
        1, ge=1, le=256, description="Chips that the model is split over, of all hosts together."
    )
    num_hosts: int = Field(1, ge=1, le=64, description="Hosts of the slice, one process each.")
    host_id: int = Field(
        0,
        ge=0,
        le=63,
        description="This process's number; 0, the leader, serves, the others follow it.",
    )
    coordinator_address: str = Field(
        "", description="Host 0's HOST:PORT, for the other hosts; the port behind it is used, too."
    )
    compile_cache: str = Field(
        "~/.cache/canopy/programs", description="Directory of compiled programs; empty: none."
    )

    @model_validator(mode="after")
    def _device_fits(self) -> Self:
        if self.platform == "tpu" and not self.chip:
            raise ValueError("chip: not set; --platform tpu needs --chip, as v5e, v6e or tpu7x")
        if self.host_id >= self.num_hosts:
            raise ValueError(
                f"host_id: {self.host_id} is outside [0, {self.num_hosts}), the slice's num_hosts"
            )
        if self.num_hosts > 1:
            self._check_group()
        return self

    def _check_group(self) -> None:
        if self.tensor_parallel % self.num_hosts:
            raise ValueError(
                f"tensor_parallel: {self.tensor_parallel} chips are no multiple of num_hosts"
                f" ({self.num_hosts}); name all chips of the slice"
            )
        host, _, port = self.coordinator_address.rpartition(":")
        if not host or not port.isascii() or not port.isdigit() or not 1 <= int(port) < 65535:
            raise ValueError(
                f"coordinator_address: {self.coordinator_address!r} is not HOST:PORT of host 0 with"
                " a port from 1 to 65534; a slice of several hosts needs it on each of them"
            )

    @property
    def group_address(self) -> tuple[str, int]:
        """Host and port where the leader hands out steps."""
        host, _, port = self.coordinator_address.rpartition(":")
        return host.strip("[]"), int(port)

    @classmethod
    def values_of_orchestrator(cls, environ: Mapping[str, str]) -> dict[str, Any]:
        """What a LeaderWorkerSet's controller says of the group."""
        leader = environ.get("LWS_LEADER_ADDRESS")
        if not leader:
            return {}
        return {
            "coordinator_address": f"{leader}:{LWS_GROUP_PORT}",
            "num_hosts": environ.get("LWS_GROUP_SIZE", "1"),
            "host_id": environ.get("LWS_WORKER_INDEX", "0"),
        }
