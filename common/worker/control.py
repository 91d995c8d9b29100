"""Pause, weights and sleep of one worker: what may follow what, and how it reaches the engine.

running ──pause──> pausing ──no live request, or frozen at once──> paused ──sleep──> asleep
   ^                  │                                              │ ^               │
   └──────────────────┴───────────────────resume─────────────────────┘ └────wake up────┘

The engine is frozen exactly while the worker is paused.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from enum import StrEnum
from functools import partial
from typing import Any, Protocol

import structlog

from common.engine.loop import Engine
from common.engine.request import RequestId
from common.errors import ConflictError, InvalidRequestError, UnavailableError
from common.kv.store import KVStore
from common.worker.lifecycle import Lifecycle
from common.worker.weights import Weights

#: After an abort a call has its last chunk to send. One whose client does not read it holds nothing that matters here.
ABORT_GRACE_S = 2.0

#: Levels of sleep: 1 gives the KV cache back, 2 the weights as well.
SLEEP_LEVELS = (1, 2)

log = structlog.get_logger()


class PauseMode(StrEnum):
    """What becomes of live requests: they end at once, are finished, or are frozen; see `Engine.freeze`."""

    ABORT = "abort"
    WAIT = "wait"
    KEEP = "keep"


class PauseState(StrEnum):
    RUNNING = "running"
    PAUSING = "pausing"
    PAUSED = "paused"


class LiveCalls(Protocol):
    """What the control needs of the Prefill or Decode service."""

    def live_requests(self) -> Sequence[RequestId]:
        """Ids of the requests whose call has not ended."""
        ...

    async def abort(self, request_id: RequestId, choice: int | None = None) -> bool:
        """Ends one live request, or one of its choices; False if there is none of that id."""
        ...


class WorkerControl:
    """One per worker, on the event loop. Calls may come at any time, from several routers."""

    def __init__(
        self, engine: Engine, store: KVStore, weights: Weights, lifecycle: Lifecycle, calls: LiveCalls
    ) -> None:
        self.state = PauseState.RUNNING
        #: 0: awake.
        self.sleep_level = 0
        self._engine = engine
        self._store = store
        self._weights = weights
        self._lifecycle = lifecycle
        self._calls = calls
        #: Held while the engine, its memory or its weights change.
        self._changing = asyncio.Lock()
        self._changes: set[asyncio.Task[None]] = set()
        #: Of the newest pause: set when it is reached, or ended by a resume.
        self._settled = asyncio.Event()

    # --- pause

    async def pause(self, mode: PauseMode) -> None:
        """Returns when the worker is paused. On one that is paused already, only ABORT has something left to do.

        A caller that gives up while it waits leaves the worker pausing.

        Raises:
            ConflictError: a resume came before.
        """
        settled = self._begin_pause(mode)
        if mode is PauseMode.ABORT:
            await self._abort_all()
        elif mode is PauseMode.WAIT:
            await _first(self._lifecycle.wait_idle(), settled.wait())
        await self._change(partial(self._freeze, settled))

    def _begin_pause(self, mode: PauseMode) -> asyncio.Event:
        """Refuses requests from now on; returns what tells how this pause begins."""
        if self.state is PauseState.RUNNING:
            self._lifecycle.paused = True
            self._settled = asyncio.Event()
            self._enter(PauseState.PAUSING, mode=mode.value)
        return self._settled

    async def _abort_all(self) -> None:
        """Ends what is live, and gives the calls a moment to say so."""
        await asyncio.gather(*(self._calls.abort(request_id) for request_id in self._calls.live_requests()))
        try:
            async with asyncio.timeout(ABORT_GRACE_S):
                await self._lifecycle.wait_idle()
        except TimeoutError:
            log.warning("aborted_calls_linger", num_live=self._lifecycle.num_live)

    async def _freeze(self, settled: asyncio.Event) -> None:
        was_ended = settled.is_set() and self.state is PauseState.PAUSING
        if self._settled is not settled or was_ended or self.state is PauseState.RUNNING:
            raise ConflictError("the worker was resumed before it was paused")
        if self.state is PauseState.PAUSING:
            await asyncio.wrap_future(self._engine.freeze())
            self._enter(PauseState.PAUSED)
            settled.set()

    async def resume(self) -> None:
        """Serves again; a pause that is still under way ends at once. Raises ConflictError if the worker sleeps."""
        if self.state is PauseState.PAUSING:
            self._settled.set()
            await asyncio.wrap_future(self._engine.give_up_freezes())
        await self._change(self._resume)

    async def _resume(self) -> None:
        if self.sleep_level:
            raise ConflictError(f"the worker sleeps at level {self.sleep_level}; wake it up first")
        if self.state is PauseState.RUNNING:
            return
        await asyncio.wrap_future(self._engine.thaw())
        self._lifecycle.paused = False
        self._enter(PauseState.RUNNING)
        self._settled.set()

    # --- weights

    async def stage_weights(self, path: str, version: str) -> str:
        """See `Weights.stage`; the fingerprint."""
        return await self._weights.stage(path, version)

    async def commit_weights(self, version: str) -> None:
        """Empties the prefix cache too, in the same moment.

        Raises:
            ConflictError: the worker is not paused, or nothing of that label is staged.
        """
        await self._change(partial(self._commit, version))

    async def _commit(self, version: str) -> None:
        self._require_paused("weights are replaced only on a paused worker")
        await self._between_steps(partial(self._weights.commit, version))

    def discard_weights(self) -> None:
        """Forgets what is staged or being loaded."""
        self._weights.discard()

    async def reset_prefix_cache(self) -> int:
        """Forgets every cached prefix; the number of blocks that were only cached, and are free now."""
        return await asyncio.wrap_future(self._engine.reset_prefix_cache())

    # --- sleep

    async def sleep(self, level: int) -> None:
        """Gives memory back; a worker that sleeps as deep already stays as it is.

        Raises:
            InvalidRequestError: there is no such level.
            ConflictError: the worker is not paused, or a request is live.
        """
        if level not in SLEEP_LEVELS:
            raise InvalidRequestError(f"level must be 1 or 2, got {level}", param="level")
        await self._change(partial(self._sleep, level))

    async def _sleep(self, level: int) -> None:
        self._require_paused("only a paused worker can sleep")
        if num_live := self._lifecycle.num_live:
            raise ConflictError(f"{num_live} requests are live and need their KV; pause with mode abort or wait")
        if level > self.sleep_level:
            await self.reset_prefix_cache()
            await self._between_steps(partial(self._give_back, level))
            self.sleep_level = level
            log.info("worker_asleep", level=level)

    def _give_back(self, level: int) -> None:
        if not self.sleep_level:
            self._store.release()
        if level == 2:
            self._weights.release()

    async def wake_up(self) -> None:
        """Takes the memory again; the worker stays paused. Does nothing on one that is awake.

        Raises:
            ConflictError: the weights cannot be loaded again.
            UnavailableError: there is no memory.
        """
        await self._change(self._wake_up)

    async def _wake_up(self) -> None:
        if not self.sleep_level:
            return
        if self._weights.released:
            loaded = await self._weights.load_again()
            await self._between_steps(partial(self._weights.restore, loaded))
        await self._between_steps(self._restore_store)
        self.sleep_level = 0
        log.info("worker_awake")

    def _restore_store(self) -> None:
        try:
            self._store.restore()
        except (RuntimeError, MemoryError) as error:  # torch's and NumPy's ways to say that memory is out
            raise UnavailableError(f"there is no room for the KV cache: {error}") from error

    # --- common

    def check_invariants(self) -> list[str]:
        """Violations, one sentence each."""
        found = []
        frozen, refusing = self._engine.frozen, self._lifecycle.paused
        if not self._changing.locked() and frozen != (self.state is PauseState.PAUSED):
            found.append(f"the worker is {self.state}, and its engine {'is' if frozen else 'is not'} frozen")
        if refusing != (self.state is not PauseState.RUNNING):
            found.append(f"the worker is {self.state}, and new requests {'are' if refusing else 'are not'} refused")
        if self.sleep_level and self.state is not PauseState.PAUSED:
            found.append(f"the worker sleeps, and is {self.state}")
        return found

    def _require_paused(self, what: str) -> None:
        if self.state is not PauseState.PAUSED:
            raise ConflictError(f"{what}, and this one is {self.state}; pause it first")

    async def _change(self, change: Callable[[], Awaitable[None]]) -> None:
        """Runs one change after the other, each to its end, even if its caller gives up meanwhile."""
        task = asyncio.create_task(self._run(change))
        self._changes.add(task)
        task.add_done_callback(self._ended)
        await asyncio.shield(task)

    async def _run(self, change: Callable[[], Awaitable[None]]) -> None:
        async with self._changing:
            await change()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._changes.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.info("control_refused", reason=str(error))

    async def _between_steps(self, visit: Callable[[], None]) -> None:
        await asyncio.wrap_future(self._engine.run_between_steps(visit))

    def _enter(self, state: PauseState, **details: object) -> None:
        log.info("worker_pause", state=state.value, before=self.state.value, **details)
        self.state = state


async def _first(*waits: Coroutine[Any, Any, object]) -> None:
    """Returns once one of them has."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
