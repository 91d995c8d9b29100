"""What the control routes do: each operation as calls to all workers, in the order that loses no request.

Decode workers are paused first, because they admit requests and need prefill workers to finish those; they are resumed
last.
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import structlog

from common.errors import ConflictError, InternalError, InvalidRequestError, UnavailableError
from common.pb import worker_pb2
from router.control.relay import ask, ask_in_order
from router.fleet import Fleet
from router.worker import Worker
from router.worker_state import State

PauseMode = Literal["abort", "wait", "keep"]

_MODES: dict[PauseMode, worker_pb2.PauseMode.ValueType] = {
    "abort": worker_pb2.PAUSE_MODE_ABORT,
    "wait": worker_pb2.PAUSE_MODE_WAIT,
    "keep": worker_pb2.PAUSE_MODE_KEEP,
}

#: For calls that a worker answers after its running step. Loading a checkpoint and waiting for requests to end take as
#: long as they take; a worker that goes away meanwhile is noticed by gRPC's keepalive.
STEP_TIMEOUT_S = 60.0

ResultT = TypeVar("ResultT")

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """An update that worked. `num_paused_requests`: frozen meanwhile, and going on with the new weights."""

    version: str
    fingerprint: str
    num_paused_requests: int


class ClusterControl:
    """Runs one operation at a time, each to its end even if its client leaves; a resume may end a pause that waits."""

    def __init__(self, fleet: Fleet) -> None:
        self.num_updates = 0
        self._fleet = fleet
        #: Held by whatever must not be mixed with anything else.
        self._alone = asyncio.Lock()
        #: Pauses and resumes under way.
        self._num_pausing = 0
        self._tasks: set[asyncio.Task[Any]] = set()

    async def close(self) -> None:
        """Ends what is under way; a weight update still resumes the workers that it paused."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- pause

    async def pause(self, mode: PauseMode, *, clear_cache: bool = False) -> None:
        """Returns when every worker is paused.

        Raises:
            ConflictError: a resume came before.
            MoerelayError: a worker failed; the others are paused nevertheless.
        """
        await self._to_its_end(self._pause(mode, clear_cache))

    async def _pause(self, mode: PauseMode, clear_cache: bool) -> None:
        async with self._pausing():
            workers = await self.workers()
            try:
                await self._pause_workers(workers, mode)
                if clear_cache:
                    await self._reset_caches(workers)
            finally:
                await self._fleet.refresh()

    async def resume(self) -> None:
        """Raises ConflictError if workers sleep, or whatever a worker reports; others are resumed nevertheless."""
        await self._to_its_end(self._resume())

    async def _resume(self) -> None:
        async with self._pausing():
            workers = await self.workers()
            try:
                await self._resume_workers(workers)
            finally:
                await self._fleet.refresh()

    async def is_paused(self) -> bool:
        """Whether nothing is served because all workers of one side are paused."""
        workers = await self.workers()
        sides = [[worker.paused for worker in workers if worker.side == side] for side in ("prefill", "decode")]
        return any(paused and all(paused) for paused in sides)

    async def _pause_workers(self, workers: Sequence[Worker], mode: PauseMode) -> None:
        request = worker_pb2.PauseRequest(mode=_MODES[mode])
        # The others wait for what is under way: "wait" for every request, "keep" for the prompts.
        timeout_s = STEP_TIMEOUT_S if mode == "abort" else None
        replies = await ask_in_order(
            workers, ("decode", "prefill"), lambda worker: worker.control.Pause(request, timeout=timeout_s)
        )
        replies.check()
        log.info("cluster_paused", mode=mode, workers=[worker.id for worker in workers])

    async def _resume_workers(self, workers: Sequence[Worker]) -> None:
        request = worker_pb2.ResumeRequest()
        replies = await ask_in_order(
            workers, ("prefill", "decode"), lambda worker: worker.control.Resume(request, timeout=STEP_TIMEOUT_S)
        )
        replies.check()
        log.info("cluster_resumed", workers=[worker.id for worker in workers])

    # --- weights

    async def update_weights(
        self, path: str, version: str | None, *, mode: PauseMode = "keep", stay_paused: bool = False
    ) -> WeightUpdate:
        """Puts the checkpoint in `path` to use on every worker, or on none.

        Workers that serve are paused meanwhile, with `mode`, and resumed unless `stay_paused`; those that were paused
        before stay so. Workers that have the version already, because an earlier update reached only some, are left as
        they are.

        Raises:
            InvalidRequestError: the checkpoint or the version cannot be used; nothing has changed.
            ConflictError: a pause or resume is under way; another update or sleep is waited for.
            InternalError: only some workers took the weights; the others are not used until they are updated.
        """
        return await self._to_its_end(self._update(path, version, mode, stay_paused))

    async def _update(self, path: str, version: str | None, mode: PauseMode, stay_paused: bool) -> WeightUpdate:
        async with self._exclusive():
            workers = await self.workers()
            version = version if version is not None else _next_version(workers)
            behind = [worker for worker in workers if worker.described.model.weight_version != version]
            if not behind:
                raise InvalidRequestError(f"every worker serves version {version!r} already", param="version")
            fingerprint = await self._stage(workers, behind, path, version)
            running = [worker for worker in workers if not worker.paused]
            try:
                await self._pause_workers(_to_pause(workers, mode), mode)
                await self._fleet.refresh()
                num_frozen = sum(worker.num_live for worker in workers if worker.side == "decode")
                await self._commit(behind, version)
            finally:
                await self._discard(behind)
                if not stay_paused:
                    await self._resume_workers(running)
                await self._fleet.refresh()
        self.num_updates += 1
        log.info("cluster_weights_updated", version=version, fingerprint=fingerprint)
        return WeightUpdate(version, fingerprint, num_frozen)

    async def _stage(self, workers: Sequence[Worker], behind: Sequence[Worker], path: str, version: str) -> str:
        """Loads the weights wherever they are not; the fingerprint that all agree on."""
        request = worker_pb2.StageWeightsRequest(path=path, version=version)
        try:
            staged = await ask(behind, lambda worker: worker.control.StageWeights(request))
            staged.check("nothing was changed")
            found = {worker.id: reply.fingerprint for worker, reply in staged.replies}
            found |= {w.id: w.described.model.fingerprint for w in workers if w not in behind}
            if len(set(found.values())) > 1:
                which = ", ".join(f"{name}: {fingerprint}" for name, fingerprint in found.items())
                raise InvalidRequestError(f"path {path!r} is not the same weights everywhere ({which})", param="path")
            return staged.replies[0][1].fingerprint
        except BaseException:
            await self._discard(behind)
            raise

    async def _commit(self, workers: Sequence[Worker], version: str) -> None:
        request = worker_pb2.CommitWeightsRequest(version=version)
        committed = await ask(workers, lambda worker: worker.control.CommitWeights(request, timeout=STEP_TIMEOUT_S))
        if committed.replies and committed.failures:
            failed = ", ".join(worker.id for worker, _ in committed.failures)
            error = committed.failure()
            assert error is not None
            raise InternalError(
                f"version {version!r} is in use, but not on {failed}: {error.message}; "
                "these workers take no requests until an update with the same version reaches them"
            )
        committed.check("nothing was changed")

    async def _discard(self, workers: Sequence[Worker]) -> None:
        """Frees what is still staged. A worker that cannot be told is gone, or replaces it with the next update."""
        request = worker_pb2.DiscardWeightsRequest()
        replies = await ask(workers, lambda worker: worker.control.DiscardWeights(request, timeout=STEP_TIMEOUT_S))
        if error := replies.failure():
            log.warning("discard_failed", error=error.message)

    # --- cache and sleep

    async def reset_prefix_cache(self) -> int:
        """Blocks that were cached, on all workers together."""
        return await self._reset_caches(await self.workers())

    async def _reset_caches(self, workers: Sequence[Worker]) -> int:
        request = worker_pb2.ResetPrefixCacheRequest()
        replies = await ask(workers, lambda worker: worker.control.ResetPrefixCache(request, timeout=STEP_TIMEOUT_S))
        replies.check()
        return sum(reply.num_blocks for _, reply in replies.replies)

    async def sleep(self, level: int, mode: PauseMode) -> None:
        """Pauses what still serves, then gives memory back on every worker; if one cannot, all are as before.

        Raises:
            ConflictError: requests are live, or a pause or resume is under way; an update is waited for.
        """
        await self._to_its_end(self._sleep(level, mode))

    async def _sleep(self, level: int, mode: PauseMode) -> None:
        async with self._exclusive():
            workers = await self.workers()
            running = [worker for worker in workers if not worker.paused]
            awake = [worker for worker in workers if not worker.described.sleep_level]
            request = worker_pb2.SleepRequest(level=level)
            try:
                await self._pause_workers(_to_pause(workers, mode), mode)
                (await ask(workers, lambda worker: worker.control.Sleep(request, timeout=STEP_TIMEOUT_S))).check()
            except BaseException:
                await self._wake_workers(awake)
                await self._resume_workers(running)
                raise
            finally:
                await self._fleet.refresh()
        log.info("cluster_asleep", level=level)

    async def wake_up(self, *, resume: bool) -> None:
        """Takes the memory again on every worker, and serves again if `resume`."""
        await self._to_its_end(self._wake_up(resume))

    async def _wake_up(self, resume: bool) -> None:
        async with self._exclusive():
            workers = await self.workers()
            try:
                await self._wake_workers(workers)
                if resume:
                    await self._resume_workers(workers)
            finally:
                await self._fleet.refresh()

    async def _wake_workers(self, workers: Sequence[Worker]) -> None:
        (await ask(workers, lambda worker: worker.control.WakeUp(worker_pb2.WakeUpRequest()))).check()

    async def sleep_level(self) -> int:
        """The deepest level at which a worker sleeps; 0 if all are awake."""
        return max(worker.described.sleep_level for worker in await self.workers())

    # --- common

    async def workers(self) -> list[Worker]:
        """Every worker that lives, with its newest state. Raises UnavailableError if there is none."""
        await self._fleet.refresh()
        alive = [worker for worker in self._fleet.workers if worker.status and worker.state is not State.DEAD]
        if not alive:
            raise UnavailableError("no worker can be reached; are they started?")
        return alive

    @asynccontextmanager
    async def _pausing(self) -> AsyncIterator[None]:
        """Waits for an operation that needs to be alone; pauses and resumes may meet each other."""
        async with self._alone:
            self._num_pausing += 1
        try:
            yield
        finally:
            self._num_pausing -= 1

    @asynccontextmanager
    async def _exclusive(self) -> AsyncIterator[None]:
        async with self._alone:
            if self._num_pausing:
                raise ConflictError("a pause or resume is under way; wait for its answer")
            yield

    async def _to_its_end(self, operation: Coroutine[Any, Any, ResultT]) -> ResultT:
        """A client that leaves must not leave the cluster half paused or with two versions."""
        task = asyncio.create_task(operation)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.warning("control_failed", error=str(error))


def _to_pause(workers: Sequence[Worker], mode: PauseMode) -> Sequence[Worker]:
    """Those that serve; what is frozen on the others must end, too, if the mode says so."""
    return workers if mode == "abort" else [worker for worker in workers if not worker.paused]


def _next_version(workers: Sequence[Worker]) -> str:
    """One more than the version in use."""
    versions = {worker.described.model.weight_version for worker in workers}
    if not all(version.isdecimal() for version in versions):
        raise InvalidRequestError(
            f"version is needed, because the one in use is no number: {', '.join(sorted(versions))}", param="version"
        )
    return str(max(map(int, versions)) + 1)
