"""A service that ends of its own fault: one line on stderr, whoever is connected."""

from __future__ import annotations

import json
import subprocess
import sys
import threading

import grpc

from canopy.v1 import generation_pb2, generation_pb2_grpc

SERVICE = '''
import asyncio, os, signal, sys
from canopy.v1 import generation_pb2_grpc
from common.config import ServiceConfig
from common.entry import run_program
from common.errors import StartupError
from common.metrics import Metrics
from common.server import run_service

class Config(ServiceConfig):
    """A service."""
    SERVICE = "router"

class Generation(generation_pb2_grpc.GenerationServiceServicer):
    async def Generate(self, request, context):
        asyncio.get_running_loop().call_later(0.2, os.kill, os.getpid(), signal.SIGTERM)
        await asyncio.Event().wait()
        yield None

class Lost:
    names = ("canopy.v1.GenerationService",)
    def register(self, server):
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(Generation(), server)
    async def start(self, health): ...
    async def drain(self, grace_seconds): ...
    async def stop(self):
        raise StartupError("the verify loop ended: the device is lost; start the service again")

metrics = Metrics("router")
config = Config.load(["--log-level", "error"], environ={})
sys.exit(run_program("canopy serve verify", lambda: run_service(Lost(), config, metrics)))
'''


def test_its_streams_leave_no_traceback() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", SERVICE], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    codes: list[grpc.StatusCode] = []

    def call(address: str) -> None:
        with grpc.insecure_channel(address) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            try:
                list(stub.Generate(generation_pb2.GenerateRequest()))
            except grpc.RpcError as error:
                codes.append(error.code())

    assert child.stdout is not None
    events = map(json.loads, child.stdout)
    address = next(event["address"] for event in events if event["event"] == "serving")
    callers = [threading.Thread(target=call, args=(address,)) for _ in range(3)]
    for caller in callers:
        caller.start()
    _, said = child.communicate(timeout=60)
    for caller in callers:
        caller.join()
    assert said == (
        "canopy serve verify: the verify loop ended: the device is lost; start the service again\n"
    )
    assert child.returncode == 1
    assert len(codes) == 3
    assert grpc.StatusCode.OK not in codes
