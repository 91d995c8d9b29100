"""The control half of a fake worker: pause, weights and sleep as a worker answers them, with failures on demand."""

import asyncio
from typing import Any

import grpc

from common.errors import MoerelayError, PausedError
from common.pb import types_pb2, worker_pb2, worker_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]

MODE_NAMES = {
    worker_pb2.PAUSE_MODE_ABORT: "abort",
    worker_pb2.PAUSE_MODE_WAIT: "wait",
    worker_pb2.PAUSE_MODE_KEEP: "keep",
}


class FakeControl(worker_pb2_grpc.WorkerServicer):
    """State that control calls change. `live` belongs to the worker: an event per request that tells it to abort."""

    def __init__(self) -> None:
        self.live: dict[str, asyncio.Event] = {}
        #: Every control call in order, e.g. "pause keep", "stage /weights 8", "commit 8", "sleep 1".
        self.control_calls: list[str] = []
        #: What a call raises instead of doing anything, by its first word.
        self.control_errors: dict[str, MoerelayError] = {}
        #: While clear, control calls are taken but not answered.
        self.control_go = asyncio.Event()
        self.control_go.set()
        #: Clear while frozen: no request makes progress.
        self.thawed = asyncio.Event()
        self.thawed.set()
        self.pause_state = worker_pb2.PAUSE_STATE_RUNNING
        self.sleep_level = 0
        self.staged_version = ""
        #: Label of the weights put to use by CommitWeights; empty: those that the script describes.
        self.committed_version = ""
        self.num_cached_blocks = 5
        #: What StageWeights finds in the directory; empty: the same as everybody.
        self.staged_fingerprint = ""

    def described(self, model: types_pb2.ModelDescription) -> types_pb2.ModelDescription:
        """`model` as it is with the weights in use."""
        current = types_pb2.ModelDescription()
        current.CopyFrom(model)
        if self.committed_version:
            current.weight_version = self.committed_version
            current.fingerprint = f"weights {self.committed_version}"
        return current

    def refuse_when_paused(self) -> None:
        if self.pause_state != worker_pb2.PAUSE_STATE_RUNNING:
            raise PausedError("the worker is paused")

    def changed(self) -> None:
        """Called after each control call."""

    async def wait_idle(self) -> None:
        """Returns when no request is live."""
        raise NotImplementedError

    async def _called(self, *words: object) -> None:
        self.control_calls.append(" ".join(map(str, words)))
        self.changed()
        await self.control_go.wait()
        if error := self.control_errors.get(str(words[0])):
            raise error

    async def Pause(self, request: worker_pb2.PauseRequest, context: Context) -> worker_pb2.PauseReply:
        await self._called("pause", MODE_NAMES[request.mode])
        self.pause_state = worker_pb2.PAUSE_STATE_PAUSING
        if request.mode == worker_pb2.PAUSE_MODE_ABORT:
            for aborted in self.live.values():
                aborted.set()
        if request.mode != worker_pb2.PAUSE_MODE_KEEP:
            await self.wait_idle()
        self.thawed.clear()
        self.pause_state = worker_pb2.PAUSE_STATE_PAUSED
        self.changed()
        return worker_pb2.PauseReply()

    async def Resume(self, request: worker_pb2.ResumeRequest, context: Context) -> worker_pb2.ResumeReply:
        await self._called("resume")
        self.pause_state = worker_pb2.PAUSE_STATE_RUNNING
        self.thawed.set()
        return worker_pb2.ResumeReply()

    async def StageWeights(
        self, request: worker_pb2.StageWeightsRequest, context: Context
    ) -> worker_pb2.StageWeightsReply:
        await self._called("stage", request.path, request.version)
        self.staged_version = request.version
        return worker_pb2.StageWeightsReply(fingerprint=self.staged_fingerprint or f"weights {request.version}")

    async def CommitWeights(
        self, request: worker_pb2.CommitWeightsRequest, context: Context
    ) -> worker_pb2.CommitWeightsReply:
        await self._called("commit", request.version)
        self.committed_version, self.staged_version = request.version, ""
        return worker_pb2.CommitWeightsReply()

    async def DiscardWeights(
        self, request: worker_pb2.DiscardWeightsRequest, context: Context
    ) -> worker_pb2.DiscardWeightsReply:
        await self._called("discard")
        self.staged_version = ""
        return worker_pb2.DiscardWeightsReply()

    async def ResetPrefixCache(
        self, request: worker_pb2.ResetPrefixCacheRequest, context: Context
    ) -> worker_pb2.ResetPrefixCacheReply:
        await self._called("reset")
        num_blocks, self.num_cached_blocks = self.num_cached_blocks, 0
        return worker_pb2.ResetPrefixCacheReply(num_blocks=num_blocks)

    async def Sleep(self, request: worker_pb2.SleepRequest, context: Context) -> worker_pb2.SleepReply:
        await self._called("sleep", request.level)
        self.sleep_level = request.level
        return worker_pb2.SleepReply()

    async def WakeUp(self, request: worker_pb2.WakeUpRequest, context: Context) -> worker_pb2.WakeUpReply:
        await self._called("wake")
        self.sleep_level = 0
        return worker_pb2.WakeUpReply()
