"""Assembles and serves one decode worker, or one worker that does both halves."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from common.config import DecodeSettings
from common.errors import ConfigError
from common.handoff.receiver import HandoffReceiver
from common.handoff.zmq_channel import ZmqListener
from common.handoff.zmq_socket import tcp_host
from common.model.config import ModelConfig
from common.pb import decode_pb2, decode_pb2_grpc, types_pb2
from common.process import host_port
from common.security.exposure import check_handoff
from common.security.key_file import KeyFile
from common.security.watched_file import WatchedFile
from common.worker.core import WorkerCore, build_core
from common.worker.keys import key_metrics, load_keys
from common.worker.lifecycle import Lifecycle
from common.worker.own_address import advertised
from common.worker.process import add_worker_service, handoff_identity, new_instance_id, running_engine, tracing_of
from common.worker.server import WorkerServer
from decode_worker.intake import Intake
from decode_worker.metrics import handoff_metrics
from decode_worker.self_check.settings import checking
from decode_worker.service import DecodeService


async def serve(settings: DecodeSettings, path: Path, config: ModelConfig) -> None:
    """Serves until told to stop; everything it opened is closed when it returns."""
    keys = load_keys(settings, "decode")
    handoff_endpoint(settings)  # before anything that takes long
    async with tracing_of(settings, "decode") as tracing:
        await _serve(
            settings, build_core(settings, path, config, swap_space_bytes=settings.swap_space, tracing=tracing), keys
        )


async def _serve(settings: DecodeSettings, core: WorkerCore, keys: WatchedFile[KeyFile] | None) -> None:
    lifecycle = Lifecycle()
    server = WorkerServer(settings, lifecycle, keys)
    instance_id = new_instance_id()
    intake = Intake(core.engine, core.spans)
    async with (
        checking(settings, core) as self_check,
        running_engine(core),
        _handoffs(settings, core, intake, instance_id, keys) as (receiver, listener),
    ):
        service = DecodeService(
            core,
            receiver,
            intake,
            lifecycle,
            local_prefill_max_tokens=settings.local_prefill_max_tokens,
            self_check=self_check,
        )
        worker_service, metrics = add_worker_service(
            server,
            settings,
            core,
            lifecycle,
            role=types_pb2.ROLE_BOTH if receiver is None else types_pb2.ROLE_DECODE,
            role_service=service,
            instance_id=instance_id,
            handoff_endpoint=listener.endpoint if listener else "",
        )
        key_metrics(metrics, keys)
        if receiver is not None and listener is not None:
            handoff_metrics(metrics, receiver, intake)
            metrics.counter("handoff_clients_refused", "Connections with a foreign key.", lambda: listener.num_refused)
            service.local_prefills.register(metrics)
        if self_check is not None:
            self_check.register(metrics)
        decode_pb2_grpc.add_DecodeServicer_to_server(service, server.grpc)
        own_service = decode_pb2.DESCRIPTOR.services_by_name["Decode"].full_name
        await server.run([worker_service, own_service], core.engine_ended())


def handoff_endpoint(settings: DecodeSettings) -> str:
    """What to bind. Raises ConfigError if it is none, or would be open to other machines without keys."""
    endpoint = settings.handoff_endpoint or f"tcp://{host_port(settings.host, 0)}"
    host = tcp_host(endpoint, ConfigError)
    if host is not None and settings.role != "both":
        check_handoff(host, has_keys=settings.cluster_key_file is not None, insecure=settings.insecure)
    return endpoint


@asynccontextmanager
async def _handoffs(
    settings: DecodeSettings,
    core: WorkerCore,
    intake: Intake,
    instance_id: str,
    keys: WatchedFile[KeyFile] | None,
) -> AsyncIterator[tuple[HandoffReceiver | None, ZmqListener | None]]:
    """The receiver and what prefill workers connect to; neither with role both."""
    if settings.role == "both":
        yield None, None
        return
    slot_bytes = core.store.layout.token_bytes + core.store.routing.row_bytes
    if settings.handoff_credit_bytes < slot_bytes:
        raise ConfigError(
            f"--handoff-credit-bytes {settings.handoff_credit_bytes} is less than the {slot_bytes} bytes of one token"
        )
    async with (
        ZmqListener(
            handoff_endpoint(settings),
            advertise_host=advertised(settings),
            admitted=(lambda: keys.value.handoff_clients) if keys else None,
        ) as listener,
        HandoffReceiver(
            listener,
            core.store,
            lambda: handoff_identity(core, instance_id),
            timeout_s=settings.handoff_timeout_s,
            credit_bytes=settings.handoff_credit_bytes,
            known_versions=lambda: core.engine.known_weight_versions,
            handler=intake,
            tracing=core.spans.tracing,
        ) as receiver,
    ):
        yield receiver, listener
