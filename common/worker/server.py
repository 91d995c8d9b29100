"""Serves one worker process: gRPC with health and reflection, until it is told to stop or its engine ends."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from common.config import WorkerSettings
from common.errors import ConfigError, InternalError
from common.process import MAX_SOCKET_PATH_BYTES, drain_or_second_signal, host_port, stop_signals, write_ready_file
from common.rpc import ErrorInterceptor, channel_options
from common.security.grpc_keys import server_credentials
from common.security.key_file import KeyFile
from common.security.watched_file import WatchedFile, keep_reading
from common.worker.lifecycle import Lifecycle
from common.worker.own_address import advertised

log = structlog.get_logger()

#: How often the health service asks whether the engine is stuck.
HEALTH_INTERVAL_S = 0.5

#: After draining (or at once on a second signal) calls that are still live get this long to unwind.
STOP_GRACE_S = 1.0


class WorkerServer:
    """A gRPC server that is bound but not started, so that its address is known before the services are made.

    `keys`: only routers with fitting ones get in. Health checks of the same user have a socket beside the ready file.
    """

    def __init__(
        self, settings: WorkerSettings, lifecycle: Lifecycle, keys: WatchedFile[KeyFile] | None = None
    ) -> None:
        self._settings = settings
        self._keys = keys
        self._lifecycle = lifecycle
        self._health = health.aio.HealthServicer()
        #: Why the worker is not healthy although it runs; asked now and then.
        self.complaint: Callable[[], str | None] = _nothing
        self.grpc = grpc.aio.server(
            interceptors=[ErrorInterceptor()], options=channel_options(settings.max_message_bytes)
        )
        self.address = host_port(advertised(settings) or settings.host, self._bind())
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)

        self._local_address = self._bind_locally()

    def _bind(self) -> int:
        listen = host_port(self._settings.host, self._settings.port)
        keys = self._keys
        try:
            if keys is None:
                return self.grpc.add_insecure_port(listen)
            return self.grpc.add_secure_port(listen, server_credentials(lambda: keys.value))
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {listen}; is the port taken? (--host, --port)") from error

    def _bind_locally(self) -> str | None:
        """With keys, there is a socket that needs none, where there is a place for it."""
        if self._keys is None or self._settings.ready_file is None:
            return None
        path = self._settings.ready_file.absolute().with_suffix(".sock")
        if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
            log.warning("no_local_socket", path=str(path), hint="a shorter --ready-file makes room for it")
            return None
        path.unlink(missing_ok=True)  # of a process before this one
        address = f"unix:{path}"
        self.grpc.add_insecure_port(address)
        path.chmod(0o600)
        return address

    async def run(self, services: Sequence[str], engine_ended: Awaitable[None]) -> None:
        """Serves until SIGTERM or SIGINT, then drains. `services` are the full names for reflection and health.

        Raises:
            InternalError: the engine thread ended by itself; a worker without it could only refuse.
        """
        reflection.enable_server_reflection((*services, health.SERVICE_NAME), self.grpc)
        async with stop_signals() as stop:
            await self.grpc.start()
            await self._set_health(services, serving=self.complaint() is None)
            if self._settings.ready_file is not None:
                write_ready_file(self._settings.ready_file, self.address, local_address=self._local_address)
            log.info("worker_ready", address=self.address)
            async with asyncio.TaskGroup() as group:
                watching = [group.create_task(self._watch_health(services))]
                watching += [group.create_task(keep_reading([self._keys]))] if self._keys else []
                alive = await _first(stop.wait(), engine_ended)
                for task in watching:
                    task.cancel()
            await self._set_health(services, serving=False)
            if alive:
                timeout_s, pre_stop_s = self._settings.drain_timeout_s, self._settings.pre_stop_s
                log.info("worker_draining", timeout_s=timeout_s, pre_stop_s=pre_stop_s)
                drained = await drain_or_second_signal(self._lifecycle.drain(timeout_s, pre_stop_s), stop)
                log.info("worker_stopping", drained=drained)
            await self.grpc.stop(STOP_GRACE_S)
        if not alive:
            raise InternalError("the engine thread has ended; see the log above, and restart this worker")

    async def _watch_health(self, services: Sequence[str]) -> None:
        """Health follows what the engine does, not only that the process runs."""
        was: str | None = None
        while True:
            complaint = self.complaint()
            if (complaint is None) is not (was is None):
                await self._set_health(services, serving=complaint is None)
                if complaint:
                    log.error("worker_unhealthy", reason=complaint)
                else:
                    log.info("worker_healthy_again")
            was = complaint
            await asyncio.sleep(HEALTH_INTERVAL_S)

    async def _set_health(self, services: Sequence[str], *, serving: bool) -> None:
        response = health_pb2.HealthCheckResponse
        for service in ("", *services):
            await self._health.set(service, response.SERVING if serving else response.NOT_SERVING)


def _nothing() -> None:
    """Nothing to complain about."""


async def _first(stop: Awaitable[object], engine_ended: Awaitable[None]) -> bool:
    """Waits for either; True if it was `stop`."""
    stopping, ended = asyncio.ensure_future(stop), asyncio.ensure_future(engine_ended)
    await asyncio.wait([stopping, ended], return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    # The thread that waits for the engine ends with it; `ended` is read so that its outcome is not lost.
    return not ended.done()
