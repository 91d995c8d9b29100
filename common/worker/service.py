"""The Worker gRPC service: who the worker is, how busy it is, abort, metrics, invariants."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc

from common.engine.request import RequestId
from common.pb import types_pb2, worker_pb2, worker_pb2_grpc
from common.rpc import PROTOCOL_VERSION
from common.worker.core import WorkerCore
from common.worker.lifecycle import Lifecycle
from common.worker.metrics import WorkerMetrics

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """What distinguishes one worker process from every other."""

    worker_id: str
    instance_id: str
    role: types_pb2.Role.ValueType
    pid: int
    address: str
    handoff_endpoint: str


class WorkerService(worker_pb2_grpc.WorkerServicer):
    """`check` yields the violations of whatever the role adds to the engine (leases, transfers)."""

    def __init__(
        self,
        identity: WorkerIdentity,
        core: WorkerCore,
        lifecycle: Lifecycle,
        metrics: WorkerMetrics,
        check: Callable[[], list[str]],
    ) -> None:
        self._identity = identity
        self._core = core
        self._lifecycle = lifecycle
        self._metrics = metrics
        self._check = check

    async def Describe(self, request: worker_pb2.DescribeRequest, context: Context) -> worker_pb2.WorkerStatus:
        load = self._core.engine.load()
        return worker_pb2.WorkerStatus(
            worker_id=self._identity.worker_id,
            instance_id=self._identity.instance_id,
            role=self._identity.role,
            pid=self._identity.pid,
            address=self._identity.address,
            handoff_endpoint=self._identity.handoff_endpoint,
            exact=self._core.exact,
            draining=self._lifecycle.draining,
            model=self._core.description,
            load=worker_pb2.WorkerLoad(
                running=load.running,
                waiting=load.waiting,
                handoffs=load.handoffs,
                kv_blocks_used=load.kv_blocks_used,
                kv_blocks_total=load.kv_blocks_total,
            ),
            protocol_version=PROTOCOL_VERSION,
        )

    async def Abort(self, request: worker_pb2.AbortRequest, context: Context) -> worker_pb2.AbortReply:
        request_id = RequestId(request.request_id)
        found = self._core.bridge.is_live(request_id)
        if found:
            self._core.engine.abort(request_id)
        return worker_pb2.AbortReply(found=found)

    async def Metrics(self, request: worker_pb2.MetricsRequest, context: Context) -> worker_pb2.MetricsReply:
        return worker_pb2.MetricsReply(exposition=self._metrics.exposition())

    async def CheckInvariants(
        self, request: worker_pb2.CheckInvariantsRequest, context: Context
    ) -> worker_pb2.CheckInvariantsReply:
        violations = await asyncio.to_thread(self._core.engine.check_invariants)
        return worker_pb2.CheckInvariantsReply(violations=[*violations, *self._check()])
