"""The engine's thread: commands in, events out, one step after the other."""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

import torch

from common.engine.admission import Admission
from common.engine.core import EngineCore
from common.engine.limits import EngineLimits
from common.engine.objectives import Attainment
from common.engine.request import EngineEvent, EngineLoad, EngineRequest, Failed, RequestId
from common.engine.stages import StageObserver
from common.engine.stats import EngineStats
from common.engine.step_fit import StepTimeFit
from common.engine.visits import Visits, run_visit
from common.errors import ConflictError, UnavailableError
from common.kv.pool import BlockPool
from common.kv.store import KVStore
from common.model.batch import Runner
from common.sampling import SampledToken

#: Event batches that may be on their way to the consumer. Two would keep the engine busy while one is being read;
#: a few more ride out a late wake-up of the consumer's thread.
MAX_OUTSTANDING_BATCHES = 8

#: Longer than any step on the slowest supported machine.
CHECK_TIMEOUT_S = 30.0

ResultT = TypeVar("ResultT")


class Engine:
    """One thread that owns scheduler, block pool and runner. All public methods may be called by any thread.

    Commands take effect between two steps, in order. The command queue is bounded by what it holds: at most
    `max_waiting` requests that wait plus the running ones, and for each one end and the frames of one handoff.

    `on_events` is called on the engine thread with everything that one step brought; it must return at once, and its
    consumer calls `events_delivered` once per batch. When MAX_OUTSTANDING_BATCHES are unacknowledged the engine waits:
    a slow consumer costs speed, never memory. Events of a request may arrive before `submit` has returned, and a last
    one after `cancel` has.

    Whoever still reads or writes a request's blocks for a handoff stops before it calls `abort` or `cancel`: the blocks
    are given to others at once.
    """

    def __init__(
        self,
        runner: Runner,
        store: KVStore,
        pool: BlockPool,
        limits: EngineLimits,
        eos_token_ids: frozenset[int],
        on_events: Callable[[list[EngineEvent]], None],
        *,
        prefix_caching: bool = True,
    ) -> None:
        self.limits = limits
        self._admission = Admission(
            limits, num_usable_blocks=pool.num_usable_blocks, block_size=store.layout.block_size
        )
        self._core = EngineCore(
            runner, store, pool, limits, eos_token_ids, self._admission, prefix_caching=prefix_caching
        )
        self._on_events = on_events
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._credit = threading.Semaphore(MAX_OUTSTANDING_BATCHES)
        self._stopping = threading.Event()
        #: Written by the engine thread only.
        self._frozen = False
        #: Futures of freezes that wait for open prompts.
        self._settling: list[Future[None]] = []
        self._visits = Visits()
        self._load = self._core.load()
        #: Of the running step, in seconds of `time.monotonic`; None while nothing or something else is to be done.
        self._step_began_at: float | None = None
        self._num_threads = 1
        self._prepare: Callable[[], None] | None = None
        self._spare: Callable[[], bool] = _nothing_to_do
        self._let_go: Callable[[], None] = _nothing
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # --- life

    def start(self, prepare: Callable[[], None] | None = None) -> None:
        """Starts the thread; it computes with the caller's `torch.get_num_threads()`.

        `prepare` is called on the thread before anything else, to choose its cpus.
        """
        self._num_threads = torch.get_num_threads()
        self._prepare = prepare
        self._thread.start()

    def stop(self) -> None:
        """Lets the running step end, fails every live request with UnavailableError, and joins. Idempotent."""
        self._stopping.set()
        self._credit.release()
        self._commands.put(_nothing)
        if self._thread.ident is not None:
            self._thread.join()

    def join(self) -> None:
        """Blocks until the thread has ended, by `stop` or by a fault."""
        self._thread.join()

    @property
    def alive(self) -> bool:
        """The thread runs. False after `stop`, and after a fault that ended it."""
        return self._thread.is_alive()

    # --- between steps

    @property
    def frozen(self) -> bool:
        """No step runs."""
        return self._frozen

    def freeze(self) -> Future[None]:
        """Stops computing; done when no step runs and none will. Commands are still taken, and their events sent.

        Prompts that are being computed, here or for here, come to their first token before, and preempted sequences
        that kept no copy of their KV are computed again; nobody else is admitted meanwhile. So neither ever comes from
        two sets of weights. That takes as many steps as those tokens need (see `Scheduler`), and as long as handoffs
        that are under way.
        """
        future: Future[None] = Future()
        if self._visits.enter(future):
            self._commands.put(partial(self._settle, future))
        return future

    def _settle(self, future: Future[None]) -> None:
        self._core.close_admission()
        self._settling.append(future)

    def _freeze_if_settled(self) -> None:
        if self._settling and not self._core.has_open_prompts():
            self._frozen = True
            self._let_go()
            for future in self._settling:
                if future.set_running_or_notify_cancel():
                    future.set_result(None)
            self._settling.clear()

    def give_up_freezes(self) -> Future[None]:
        """Goes on as if none had been asked for: those that are not done fail with ConflictError. Changes no other."""
        return self.run_between_steps(self._give_up_freezes)

    def _give_up_freezes(self) -> None:
        for future in self._settling:
            if future.set_running_or_notify_cancel():
                future.set_exception(ConflictError("the engine was resumed before it stood still"))
        if self._settling:
            self._core.open_admission()
        self._settling.clear()

    def thaw(self) -> Future[None]:
        """Computes again, with everything that is live."""
        return self.run_between_steps(self._thaw)

    def _thaw(self) -> None:
        self._frozen = False
        self._core.open_admission()

    def label_tokens(self, version: str) -> None:
        """Names the weights in use: every token sampled from now on says so. Before `start`, or between steps.

        Empties the prefix cache.
        """
        self._core.weight_version = version

    def reset_prefix_cache(self) -> Future[int]:
        """Forgets every cached prefix; the number of blocks that became free."""
        return self.run_between_steps(self._core.reset_prefix_cache)

    def run_between_steps(self, visit: Callable[[], ResultT]) -> Future[ResultT]:
        """Runs `visit` on the engine thread, after all earlier commands and while no step runs, also when frozen.

        The future gets its result or its exception; UnavailableError if the engine ends before.
        """
        future: Future[ResultT] = Future()
        if self._visits.enter(future):
            self._commands.put(partial(run_visit, visit, future))
        return future

    # --- spare time

    def use_spare_time(self, work: Callable[[], bool], let_go: Callable[[], None]) -> None:
        """Lets `work` do one small thing after the other on the engine thread while nothing else is to be done.

        It is called only when no sequence can be computed, no command waits and the engine is not frozen, and says
        whether there may be more to do; what comes in the meantime waits until it returns. `let_go` is called when the
        engine freezes: weights and memory may be taken away then. Before `start`.
        """
        self._spare, self._let_go = work, let_go

    def wake(self) -> None:
        """There is something to do in spare time."""
        self._commands.put(_nothing)

    # --- requests

    def submit(self, request: EngineRequest) -> None:
        """Queues a request. A refusal is raised here and causes no event.

        Raises:
            InvalidRequestError: it can never be served by this engine.
            DuplicateRequestError: its id is live.
            OverloadedError: `max_waiting` requests wait, or those ahead take longer than the TTFT objective allows.
            UnavailableError: the engine has stopped.
        """
        self._admission.enter(request)
        self._commands.put(partial(self._core.add, request))

    def handoff_advanced(self, request_id: RequestId, computed: int) -> None:
        """Work.DECODE: KV and rows of positions [0, computed) are in the leased slots; their rows become an event."""
        self._command(request_id, partial(self._core.advance_handoff, request_id, computed))

    def commit_handoff(self, request_id: RequestId, first_tokens: Sequence[SampledToken], num_cached: int = 0) -> None:
        """Work.DECODE: the whole prompt is in the leased slots. Choices that their first token ends run no step.

        `num_cached`: prompt tokens that were not computed for this request where the handoff comes from.
        """
        self._command(request_id, partial(self._core.commit_handoff, request_id, first_tokens, num_cached))

    def abort(self, request_id: RequestId, choice: int | None = None) -> None:
        """Ends the request or one of its choices, in any phase.

        Each choice that ends has an event of finish reason ABORT without tokens and rows.
        """
        if self._admission.try_begin_end(request_id, choice):
            self._commands.put(partial(self._core.abort, request_id, choice))

    def cancel(self, request_id: RequestId) -> None:
        """Ends the request, in any phase, without an event. Idempotent; unknown ids are ignored."""
        if self._admission.try_begin_end(request_id):
            self._commands.put(partial(self._core.cancel, request_id))

    def _command(self, request_id: RequestId, command: Callable[[], None]) -> None:
        if self._admission.is_live(request_id):
            self._commands.put(command)

    def events_delivered(self) -> None:
        """The consumer has read one batch of events."""
        self._credit.release()

    # --- observation

    def observe_stages(self, observer: StageObserver) -> None:
        """From now on `observer` is told, on the engine thread, how long each stage of a request took."""
        self._core.observer = observer

    @property
    def known_weight_versions(self) -> frozenset[str]:
        """Labels of all weights that were in use here."""
        return self._core.known_weight_versions

    @property
    def stats(self) -> EngineStats:
        return self._core.stats

    @property
    def step_fit(self) -> StepTimeFit:
        """What steps take here, as measured so far."""
        return self._core.step_fit

    @property
    def attainment(self) -> Attainment:
        """How many requests kept to their objectives."""
        return self._core.attainment

    @property
    def num_refused_full(self) -> int:
        """Requests that were refused because too many wait."""
        return self._admission.num_refused_full

    @property
    def num_refused_late(self) -> int:
        """Requests that were refused because their first token would have come too late."""
        return self._admission.num_refused_late

    def load(self) -> EngineLoad:
        """Live counts, at most one step old."""
        return self._load

    def busy_s(self, now: float) -> float:
        """How long the running step takes already, until its events are told, or work in spare time; else 0.

        `now` by `time.monotonic`.
        """
        began_at = self._step_began_at
        return 0.0 if began_at is None else now - began_at

    def check_invariants(self) -> list[str]:
        """Violations, one sentence each, found on the engine thread between two steps.

        Blocks for up to CHECK_TIMEOUT_S: an event loop calls it in a worker thread.
        """
        if not self.alive:
            return ["the engine thread is not running"]
        try:
            return self.run_between_steps(self._core.check_invariants).result(CHECK_TIMEOUT_S)
        except UnavailableError as error:
            return [error.message]
        except TimeoutError:
            return [f"the engine thread did not answer within {CHECK_TIMEOUT_S:g} s"]

    # --- the thread

    def _run(self) -> None:
        # OpenMP keeps the thread count per thread and a new one starts with every core: oneDNN would use them all, and
        # several workers on one machine would fight for them.
        torch.set_num_threads(self._num_threads)
        idle = False
        try:
            if self._prepare is not None:
                self._prepare()
            while not self._stopping.is_set():
                self._take_commands(wait=self._frozen or (idle and not self._use_spare_time()))
                self._freeze_if_settled()
                idle = self._timed(self._turn)
        finally:
            self._abandon()

    def _take_commands(self, *, wait: bool) -> None:
        """Runs the commands that have come; with `wait` at least one, because without one nothing can move."""
        try:
            while True:
                self._commands.get(block=wait)()
                wait = False
        except queue.Empty:
            return

    def _turn(self) -> bool:
        """One step, if there is anything to compute, and what came of it; whether nothing can move."""
        idle = not self._frozen and not self._core.step()
        self._freeze_if_settled()
        self._load = self._core.load()
        self._emit(self._core.take_events())
        return idle

    def _use_spare_time(self) -> bool:
        """Whether something was done, or there is no time to spare."""
        return not self._commands.empty() or self._timed(self._spare)

    def _timed(self, work: Callable[[], bool]) -> bool:
        """What `busy_s` tells of while it runs: requests wait for its end."""
        self._step_began_at = time.monotonic()
        try:
            return work()
        finally:
            self._step_began_at = None

    def _emit(self, events: list[EngineEvent]) -> None:
        if events:
            self._credit.acquire()
            self._on_events(events)

    def _abandon(self) -> None:
        """Tells every live request that the engine is gone, also those whose `submit` was not read any more."""
        error = UnavailableError("the engine stopped before the request ended; send it to another worker")
        orphans = self._admission.close()
        if orphans:
            self._on_events([Failed(request_id, error) for request_id in orphans])
        for request_id in orphans:
            self._core.cancel(request_id)
        self._load = self._core.load()
        self._visits.close()


def _nothing() -> None:
    """As a command, wakes the thread."""


def _nothing_to_do() -> bool:
    """What an engine does in its spare time unless it is told."""
    return False
