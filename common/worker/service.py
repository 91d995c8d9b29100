"""The Worker gRPC service: who the worker is, how busy it is, abort, metrics, invariants."""

import asyncio
from dataclasses import dataclass
from typing import Any, Protocol

import grpc

from common.engine.request import RequestId
from common.errors import InternalError
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


class RoleService(Protocol):
    """What the Worker service needs to know of the Prefill or Decode service beside it."""

    async def abort(self, request_id: RequestId) -> bool:
        """Ends one live request; False if there is none of that id."""
        ...

    def check_invariants(self) -> list[str]:
        """Violations in what the role adds to the engine: leases, transfers."""
        ...


class WorkerService(worker_pb2_grpc.WorkerServicer):
    """Answers for one worker, of whatever role."""

    def __init__(
        self,
        identity: WorkerIdentity,
        core: WorkerCore,
        lifecycle: Lifecycle,
        metrics: WorkerMetrics,
        role_service: RoleService,
    ) -> None:
        self._identity = identity
        self._core = core
        self._lifecycle = lifecycle
        self._metrics = metrics
        self._role_service = role_service

    async def Describe(self, request: worker_pb2.DescribeRequest, context: Context) -> worker_pb2.WorkerStatus:
        if not self._core.engine.alive:
            raise InternalError("the engine thread has ended; restart this worker")
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
        return worker_pb2.AbortReply(found=await self._role_service.abort(RequestId(request.request_id)))

    async def Metrics(self, request: worker_pb2.MetricsRequest, context: Context) -> worker_pb2.MetricsReply:
        return worker_pb2.MetricsReply(exposition=self._metrics.exposition())

    async def CheckInvariants(
        self, request: worker_pb2.CheckInvariantsRequest, context: Context
    ) -> worker_pb2.CheckInvariantsReply:
        violations = await asyncio.to_thread(self._core.engine.check_invariants)
        return worker_pb2.CheckInvariantsReply(violations=[*violations, *self._role_service.check_invariants()])
