"""The Worker gRPC service: who the worker is, how busy it is, abort, control, metrics, invariants."""

import asyncio
from dataclasses import dataclass
from typing import Any, Protocol

import grpc

from common.engine.request import RequestId
from common.engine.step_fit import StepTimeFit
from common.errors import InternalError, InvalidRequestError
from common.pb import types_pb2, worker_pb2, worker_pb2_grpc
from common.rpc import PROTOCOL_VERSION
from common.worker.control import LiveCalls, PauseMode, PauseState, WorkerControl
from common.worker.core import WorkerCore
from common.worker.engine_health import EngineHealth
from common.worker.lifecycle import Lifecycle
from common.worker.metrics import WorkerMetrics

Context = grpc.aio.ServicerContext[Any, Any]

_MODES = {
    worker_pb2.PAUSE_MODE_ABORT: PauseMode.ABORT,
    worker_pb2.PAUSE_MODE_WAIT: PauseMode.WAIT,
    worker_pb2.PAUSE_MODE_KEEP: PauseMode.KEEP,
}

_STATES = {
    PauseState.RUNNING: worker_pb2.PAUSE_STATE_RUNNING,
    PauseState.PAUSING: worker_pb2.PAUSE_STATE_PAUSING,
    PauseState.PAUSED: worker_pb2.PAUSE_STATE_PAUSED,
}


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """What distinguishes one worker process from every other."""

    worker_id: str
    instance_id: str
    role: types_pb2.Role.ValueType
    pid: int
    address: str
    handoff_endpoint: str


class RoleService(LiveCalls, Protocol):
    """What the Worker service needs to know of the Prefill or Decode service beside it."""

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
        control: WorkerControl,
        health: EngineHealth,
    ) -> None:
        self._identity = identity
        self._core = core
        self._lifecycle = lifecycle
        self._metrics = metrics
        self._role_service = role_service
        self._control = control
        self._health = health

    async def Describe(self, request: worker_pb2.DescribeRequest, context: Context) -> worker_pb2.WorkerStatus:
        if complaint := self._health.complaint():
            raise InternalError(complaint)
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
                kv_blocks_cached=load.kv_blocks_cached,
                kv_blocks_total=load.kv_blocks_total,
            ),
            protocol_version=PROTOCOL_VERSION,
            pause=_STATES[self._control.state],
            sleep_level=self._control.sleep_level,
            staged_version=self._core.weights.staged_version,
            cpus=self._core.cores.cpus,
            threads=self._core.cores.threads,
            step_times=_step_times(self._core.engine.step_fit),
            max_num_batched_tokens=self._core.engine.limits.max_num_batched_tokens,
            max_num_seqs=self._core.engine.limits.max_num_seqs,
        )

    async def Abort(self, request: worker_pb2.AbortRequest, context: Context) -> worker_pb2.AbortReply:
        choice = request.choice if request.HasField("choice") else None
        return worker_pb2.AbortReply(found=await self._role_service.abort(RequestId(request.request_id), choice))

    async def Pause(self, request: worker_pb2.PauseRequest, context: Context) -> worker_pb2.PauseReply:
        if (mode := _MODES.get(request.mode)) is None:
            raise InvalidRequestError("mode must be abort, wait or keep", param="mode")
        await self._control.pause(mode)
        return worker_pb2.PauseReply()

    async def Resume(self, request: worker_pb2.ResumeRequest, context: Context) -> worker_pb2.ResumeReply:
        await self._control.resume()
        return worker_pb2.ResumeReply()

    async def StageWeights(
        self, request: worker_pb2.StageWeightsRequest, context: Context
    ) -> worker_pb2.StageWeightsReply:
        fingerprint = await self._control.stage_weights(request.path, request.version)
        return worker_pb2.StageWeightsReply(fingerprint=fingerprint)

    async def CommitWeights(
        self, request: worker_pb2.CommitWeightsRequest, context: Context
    ) -> worker_pb2.CommitWeightsReply:
        await self._control.commit_weights(request.version)
        return worker_pb2.CommitWeightsReply()

    async def DiscardWeights(
        self, request: worker_pb2.DiscardWeightsRequest, context: Context
    ) -> worker_pb2.DiscardWeightsReply:
        self._control.discard_weights()
        return worker_pb2.DiscardWeightsReply()

    async def ResetPrefixCache(
        self, request: worker_pb2.ResetPrefixCacheRequest, context: Context
    ) -> worker_pb2.ResetPrefixCacheReply:
        return worker_pb2.ResetPrefixCacheReply(num_blocks=await self._control.reset_prefix_cache())

    async def Sleep(self, request: worker_pb2.SleepRequest, context: Context) -> worker_pb2.SleepReply:
        await self._control.sleep(request.level)
        return worker_pb2.SleepReply()

    async def WakeUp(self, request: worker_pb2.WakeUpRequest, context: Context) -> worker_pb2.WakeUpReply:
        await self._control.wake_up()
        return worker_pb2.WakeUpReply()

    async def Metrics(self, request: worker_pb2.MetricsRequest, context: Context) -> worker_pb2.MetricsReply:
        return worker_pb2.MetricsReply(exposition=self._metrics.exposition())

    async def CheckInvariants(
        self, request: worker_pb2.CheckInvariantsRequest, context: Context
    ) -> worker_pb2.CheckInvariantsReply:
        violations = await asyncio.to_thread(self._core.engine.check_invariants)
        violations += self._role_service.check_invariants() + self._control.check_invariants()
        return worker_pb2.CheckInvariantsReply(violations=violations)


def _step_times(fit: StepTimeFit) -> worker_pb2.StepTimes:
    return worker_pb2.StepTimes(
        **fit.times._asdict(), prompt_steps=fit.num_prompt_steps, decode_steps=fit.num_decode_steps, error=fit.error
    )
