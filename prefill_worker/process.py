"""Assembles and serves one prefill worker."""

from functools import partial
from pathlib import Path

from common.config import PrefillSettings
from common.handoff.sender import HandoffSender
from common.handoff.zmq_channel import ZmqConnector
from common.model.config import ModelConfig
from common.pb import prefill_pb2, prefill_pb2_grpc, types_pb2
from common.security.key_file import KeyFile
from common.security.watched_file import WatchedFile
from common.worker.core import WorkerCore, build_core
from common.worker.keys import key_metrics, load_keys
from common.worker.lifecycle import Lifecycle
from common.worker.process import add_worker_service, handoff_identity, new_instance_id, running_engine, tracing_of
from common.worker.server import WorkerServer
from prefill_worker.metrics import handoff_metrics
from prefill_worker.service import PrefillService


async def serve(settings: PrefillSettings, path: Path, config: ModelConfig) -> None:
    """Serves until told to stop; everything it opened is closed when it returns."""
    keys = load_keys(settings, "prefill")
    async with tracing_of(settings, "prefill") as tracing:
        await _serve(settings, build_core(settings, path, config, tracing=tracing), keys)


async def _serve(settings: PrefillSettings, core: WorkerCore, keys: WatchedFile[KeyFile] | None) -> None:
    lifecycle = Lifecycle()
    server = WorkerServer(settings, lifecycle, keys)
    instance_id = new_instance_id()
    async with (
        running_engine(core),
        ZmqConnector(secret_key=partial(_secret_key, keys) if keys else None, insecure=settings.insecure) as connector,
        HandoffSender(
            connector, core.store, lambda: handoff_identity(core, instance_id), timeout_s=settings.handoff_timeout_s
        ) as sender,
    ):
        service = PrefillService(core, sender, lifecycle)
        worker_service, metrics = add_worker_service(
            server,
            settings,
            core,
            lifecycle,
            role=types_pb2.ROLE_PREFILL,
            role_service=service,
            instance_id=instance_id,
        )
        key_metrics(metrics, keys)
        handoff_metrics(metrics, service.stats)
        prefill_pb2_grpc.add_PrefillServicer_to_server(service, server.grpc)
        own_service = prefill_pb2.DESCRIPTOR.services_by_name["Prefill"].full_name
        await server.run([worker_service, own_service], core.engine_ended())


def _secret_key(keys: WatchedFile[KeyFile]) -> str:
    """What this worker shows to decode workers now."""
    assert keys.value.handoff_secret_key is not None, "a file for prefill workers has one"
    return keys.value.handoff_secret_key
