"""Runs one worker: the engine around its services, in the order in which they must start and stop."""

import os
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from common.config import WorkerSettings, is_loopback
from common.handoff.messages import HandoffIdentity
from common.messages import ROLE_NAMES
from common.pb import types_pb2, worker_pb2, worker_pb2_grpc
from common.tracing import Tracing, open_tracing
from common.worker.control import WorkerControl
from common.worker.core import WorkerCore
from common.worker.engine_health import EngineHealth
from common.worker.lifecycle import Lifecycle
from common.worker.metrics import WorkerMetrics, control_metrics, engine_metrics
from common.worker.server import WorkerServer
from common.worker.service import RoleService, WorkerIdentity, WorkerService

#: Where a worker may listen without saying at which address others reach it.
_ALL_ADDRESSES = ("0.0.0.0", "[::]")


def new_instance_id() -> str:
    """Names one process start, so that a peer notices that a worker was replaced."""
    return secrets.token_hex(8)


def default_worker_id(role: str, address: str) -> str:
    """`decode-7002` on loopback; beyond it, where other machines use the same port, `decode-d0.example:7002`."""
    host, _, port = address.rpartition(":")
    if is_loopback(host.strip("[]")):
        return f"{role}-{port}"
    return f"{role}-{socket.gethostname()}:{port}" if host in _ALL_ADDRESSES else f"{role}-{address}"


def tracing_of(settings: WorkerSettings, service: str) -> AbstractAsyncContextManager[Tracing]:
    """Where a worker's traces go, while it is entered. Raises ConfigError if they cannot."""
    endpoint, ratio = settings.otlp_traces_endpoint, settings.trace_sample_ratio
    return open_tracing(endpoint, ratio, service=service, instance=settings.worker_id)


@asynccontextmanager
async def running_engine(core: WorkerCore) -> AsyncIterator[None]:
    """The engine thread, bound to this event loop."""
    core.bridge.start()
    core.cores.let_others_go()
    core.engine.start(core.cores.keep_engine)
    try:
        yield
    finally:
        core.engine.stop()


def add_worker_service(
    server: WorkerServer,
    settings: WorkerSettings,
    core: WorkerCore,
    lifecycle: Lifecycle,
    *,
    role: types_pb2.Role.ValueType,
    role_service: RoleService,
    instance_id: str,
    handoff_endpoint: str = "",
) -> tuple[str, WorkerMetrics]:
    """Registers the Worker service; returns its full name and the metrics that the role adds its own to."""
    name = ROLE_NAMES[role]
    worker_id = settings.worker_id or default_worker_id(name, server.address)
    metrics = WorkerMetrics(name, worker_id)
    metrics.add_process()
    engine_metrics(metrics, core.engine, core.spans)
    control = WorkerControl(core.engine, core.store, core.weights, lifecycle, role_service)
    control_metrics(metrics, control, core.weights)
    health = EngineHealth(core.engine, settings.step_timeout_s)
    server.complaint = health.complaint
    identity = WorkerIdentity(worker_id, instance_id, role, os.getpid(), server.address, handoff_endpoint)
    service = WorkerService(identity, core, lifecycle, metrics, role_service, control, health)
    worker_pb2_grpc.add_WorkerServicer_to_server(service, server.grpc)
    return worker_pb2.DESCRIPTOR.services_by_name["Worker"].full_name, metrics


def handoff_identity(core: WorkerCore, instance_id: str) -> HandoffIdentity:
    """What both ends of a handoff compare."""
    model = core.description
    return HandoffIdentity(
        instance_id=instance_id,
        fingerprint=model.fingerprint,
        weight_version=model.weight_version,
        numerics=model.numerics,
        dtype=model.dtype,
        block_size=model.block_size,
        num_layers=model.num_layers,
        num_kv_planes=model.num_kv_planes,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        routing_dtype=model.routing_dtype,
        top_k=model.top_k,
        num_experts=model.num_experts,
        routing_enabled=model.routing_enabled,
        max_model_len=model.max_model_len,
    )
