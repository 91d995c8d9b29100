"""Serves one worker process: gRPC with health and reflection, the ready file, signals, draining."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from common.config import WorkerSettings, is_loopback
from common.errors import ConfigError
from common.rpc import ErrorInterceptor, channel_options
from common.worker.lifecycle import Lifecycle

log = structlog.get_logger()

HealthStatus = health_pb2.HealthCheckResponse.ServingStatus

#: After draining (or at once on a second signal) calls that are still live get this long to unwind.
STOP_GRACE_S = 1.0


class WorkerServer:
    """A gRPC server that is bound but not started, so that its address is known before the services are made."""

    def __init__(self, settings: WorkerSettings, lifecycle: Lifecycle) -> None:
        self._settings = settings
        self._lifecycle = lifecycle
        self._health = health.aio.HealthServicer()
        self.grpc = grpc.aio.server(
            interceptors=[ErrorInterceptor()], options=channel_options(settings.max_message_bytes)
        )
        self.address = f"{settings.reachable_host}:{self._bind()}"
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)

    def _bind(self) -> int:
        listen = f"{self._settings.host}:{self._settings.port}"
        if not is_loopback(self._settings.host):
            log.warning("listening_beyond_loopback", listen=listen, hint="anyone who reaches this port can use it")
        try:
            return self.grpc.add_insecure_port(listen)
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {listen}; is the port taken? (--host, --port)") from error

    async def run(self, services: Sequence[str]) -> None:
        """Serves until SIGTERM or SIGINT, then drains. `services` are the full names for reflection and health."""
        reflection.enable_server_reflection(
            (*services, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name), self.grpc
        )
        async with _signals() as stop:
            await self.grpc.start()
            await self._set_health(services, serving=True)
            if self._settings.ready_file is not None:
                write_ready_file(self._settings.ready_file, self.address)
            log.info("worker_ready", address=self.address)
            await stop.wait()
            stop.clear()
            await self._set_health(services, serving=False)
            await self._drain_or_second_signal(stop)
            await self.grpc.stop(STOP_GRACE_S)

    async def _set_health(self, services: Sequence[str], *, serving: bool) -> None:
        response = health_pb2.HealthCheckResponse
        for service in ("", *services):
            await self._health.set(service, response.SERVING if serving else response.NOT_SERVING)

    async def _drain_or_second_signal(self, stop: asyncio.Event) -> None:
        log.info("worker_draining", timeout_s=self._settings.drain_timeout_s)
        drained = asyncio.ensure_future(self._lifecycle.drain(self._settings.drain_timeout_s))
        forced = asyncio.ensure_future(stop.wait())
        await asyncio.wait([drained, forced], return_when=asyncio.FIRST_COMPLETED)
        clean = drained.done() and drained.result()
        for waiter in (drained, forced):
            waiter.cancel()
        log.info("worker_stopping", drained=clean)


@asynccontextmanager
async def _signals() -> AsyncIterator[asyncio.Event]:
    """An event that SIGTERM and SIGINT set."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        yield stop
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def write_ready_file(path: Path, address: str) -> None:
    """Writes {"address", "pid"} in one step, so that a reader never sees half of it."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps({"address": address, "pid": os.getpid()}))
    partial.replace(path)
