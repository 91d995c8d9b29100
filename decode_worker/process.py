"""Assembles and serves one decode worker, or one worker that does both halves."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from common.config import DecodeSettings
from common.errors import ConfigError
from common.handoff.receiver import HandoffReceiver
from common.handoff.zmq_channel import ZmqListener
from common.model.config import ModelConfig
from common.pb import decode_pb2, decode_pb2_grpc, types_pb2
from common.process import host_port
from common.worker.core import WorkerCore, build_core
from common.worker.lifecycle import Lifecycle
from common.worker.metrics import WorkerMetrics
from common.worker.own_address import advertised
from common.worker.process import add_worker_service, handoff_identity, new_instance_id, running_engine
from common.worker.server import WorkerServer
from decode_worker.intake import Intake
from decode_worker.service import DecodeService


async def serve(settings: DecodeSettings, path: Path, config: ModelConfig) -> None:
    """Serves until told to stop; everything it opened is closed when it returns."""
    core = build_core(settings, path, config, swap_space_bytes=settings.swap_space)
    lifecycle = Lifecycle()
    server = WorkerServer(settings, lifecycle)
    instance_id = new_instance_id()
    intake = Intake(core.engine)
    async with running_engine(core), _handoffs(settings, core, intake, instance_id) as (receiver, endpoint):
        service = DecodeService(
            core, receiver, intake, lifecycle, local_prefill_max_tokens=settings.local_prefill_max_tokens
        )
        worker_service, metrics = add_worker_service(
            server,
            settings,
            core,
            lifecycle,
            role=types_pb2.ROLE_BOTH if receiver is None else types_pb2.ROLE_DECODE,
            role_service=service,
            instance_id=instance_id,
            handoff_endpoint=endpoint,
        )
        if receiver is not None:
            _handoff_metrics(metrics, receiver, intake)
            service.local_prefills.register(metrics)
        decode_pb2_grpc.add_DecodeServicer_to_server(service, server.grpc)
        own_service = decode_pb2.DESCRIPTOR.services_by_name["Decode"].full_name
        await server.run([worker_service, own_service], core.engine_ended())


@asynccontextmanager
async def _handoffs(
    settings: DecodeSettings, core: WorkerCore, intake: Intake, instance_id: str
) -> AsyncIterator[tuple[HandoffReceiver | None, str]]:
    """The receiver and the endpoint that prefill workers connect to; neither with role both."""
    if settings.role == "both":
        yield None, ""
        return
    slot_bytes = core.store.layout.token_bytes + core.store.routing.row_bytes
    if settings.handoff_credit_bytes < slot_bytes:
        raise ConfigError(
            f"--handoff-credit-bytes {settings.handoff_credit_bytes} is less than the {slot_bytes} bytes of one token"
        )
    endpoint = settings.handoff_endpoint or f"tcp://{host_port(settings.host, 0)}"
    async with (
        ZmqListener(endpoint, advertise_host=advertised(settings)) as listener,
        HandoffReceiver(
            listener,
            core.store,
            lambda: handoff_identity(core, instance_id),
            timeout_s=settings.handoff_timeout_s,
            credit_bytes=settings.handoff_credit_bytes,
            known_versions=lambda: core.engine.known_weight_versions,
            handler=intake,
        ) as receiver,
    ):
        yield receiver, listener.endpoint


#: From an idle engine, which takes a prompt over at once, to one whose step is a long prompt's.
COMMIT_BUCKETS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


def _handoff_metrics(metrics: WorkerMetrics, receiver: HandoffReceiver, intake: Intake) -> None:
    metrics.counter("handoff_bytes", "Bytes of KV and routing rows received.", lambda: receiver.bytes_received)
    metrics.counter("routing_rows_received", "Routing rows received.", lambda: receiver.rows_received)
    metrics.counter("handoff_failures", "Handoffs that ended in an error.", lambda: intake.num_failed)
    metrics.counter("handoff_discarded", "Messages for leases that were over.", lambda: receiver.num_discarded)
    metrics.counter("handoff_malformed", "Messages that could not be read.", lambda: receiver.num_malformed)
    intake.observe_commit = metrics.histogram(
        "handoff_commit_seconds", "A handoff's last message to the engine's next step.", COMMIT_BUCKETS
    )
