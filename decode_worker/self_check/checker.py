"""Draws requests, computes them again in the engine's spare time, and tells what differs."""

import random
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Protocol

import structlog

from common.engine.request import EngineRequest
from common.engine.solo import SoloResult, SoloRunner
from common.errors import MoerelayError
from common.kv.store import KVStore
from common.model.batch import Runner
from common.pb import types_pb2
from common.worker.metrics import WorkerMetrics
from decode_worker.outbox import Outbox
from decode_worker.self_check.recording import Recording
from decode_worker.self_check.reproducer import PackedTold, Reproducer, ReproducerFiles
from decode_worker.self_check.tally import Skip, Tally
from decode_worker.self_check.told import Differences, Kind, Told, compare

#: Requests that are recorded or wait at a time: what they were told stays in memory that long.
MAX_RECORDED = 32

#: Prompt tokens per forward pass. A request that arrives meanwhile waits for it, so that it should be short.
PIECE_TOKENS = 64

log = structlog.get_logger()


class SpareTime(Protocol):
    """What is needed of the engine."""

    def use_spare_time(self, work: Callable[[], bool], let_go: Callable[[], None]) -> None: ...
    def wake(self) -> None: ...


class Worker(Protocol):
    """What is needed of the worker whose requests are checked."""

    @property
    def description(self) -> types_pb2.ModelDescription: ...
    @property
    def store(self) -> KVStore: ...
    @property
    def engine(self) -> SpareTime: ...
    @property
    def make_solo_runner(self) -> Callable[[KVStore], Runner]: ...


@dataclass(frozen=True, slots=True)
class _Job:
    """One choice that ended by itself."""

    request: EngineRequest
    choice: int
    served: Told

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt) + len(self.served.tokens)

    @property
    def versions(self) -> set[str]:
        """Labels of the weights that its tokens were sampled from."""
        return {token.weight_version for token in self.served.tokens}


@dataclass(frozen=True, slots=True)
class _Run:
    """A solo run under way, with the weights of that label."""

    job: _Job
    version: str
    steps: Generator[None, None, SoloResult]


@dataclass(frozen=True, slots=True)
class _Verdict:
    """A solo run that came out differently, or ended in an error."""

    differences: Differences
    solo: Told | None
    error: str | None = None


class SelfCheck:
    """One per decode worker.

    Requests are drawn and recorded on the event loop. A solo run is computed on the engine thread, one forward pass at
    a time and only while the engine has nothing else to do, in a store of its own and with the worker's own weights.
    """

    def __init__(
        self,
        worker: Worker,
        rate: float,
        *,
        max_tokens: int,
        files: ReproducerFiles | None = None,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Before the engine starts.

        Args:
            rate: share of the requests that are drawn.
            max_tokens: of a sequence, prompt included; longer ones are left out, because their KV takes room.
            files: where requests that came out differently are kept.
        """
        self.tally = Tally()
        self._worker = worker
        self._rate = rate
        self._max_tokens = max_tokens
        self._files = files
        self._rng = rng or random.Random()
        self._clock = clock
        self._num_recording = 0
        self._waiting: deque[_Job] = deque()
        self._run: _Run | None = None
        #: Writes files: an engine does not wait for a disk.
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="self-check")
        worker.engine.use_spare_time(self.spare, self.let_go)

    @property
    def num_waiting(self) -> int:
        """Recorded requests whose solo run has not ended."""
        return len(self._waiting) + (self._run is not None)

    def register(self, metrics: WorkerMetrics) -> None:
        """Shows on `metrics` what was found, and what waits."""
        self.tally.register(metrics)
        metrics.gauge("self_check_waiting", "Requests that wait to be computed again.", lambda: self.num_waiting)

    def close(self) -> None:
        """Forgets what waits; files that are being written are finished. After the engine has stopped."""
        self._waiting.clear()
        self._run = None
        self._writer.shutdown()

    # --- on the event loop

    @contextmanager
    def watching(self, request: EngineRequest, outbox: Outbox) -> Iterator[None]:
        """Around everything that `outbox` gives away; the request is checked afterwards, if it is drawn."""
        if self._rng.random() >= self._rate:
            yield
            return
        if self._num_recording + self.num_waiting >= MAX_RECORDED:
            self.tally.skipped[Skip.BUSY] += 1
            yield
            return
        recording = Recording(request)
        outbox.on_taken = recording.add
        self._num_recording += 1
        try:
            yield
        finally:
            self._num_recording -= 1
            self._recorded(recording)

    def _recorded(self, recording: Recording) -> None:
        """One choice of several: over time all are checked, and a request costs what it has cost before."""
        whole = [index for index, choice in enumerate(recording.choices) if choice.is_whole]
        if not whole:
            self.tally.skipped[Skip.ABORTED if recording.is_over else Skip.UNFINISHED] += 1
            return
        if not recording.is_over:
            self.tally.skipped[Skip.UNFINISHED] += 1
            return
        index = self._rng.choice(whole)
        choice = recording.choices[index]
        assert choice.finish is not None, "it is whole"
        served = Told(choice.tokens, choice.rows_TLK, choice.finish, recording.prompt_logprobs)
        job = _Job(recording.request, index, served)
        if job.num_tokens > self._max_tokens:
            self.tally.skipped[Skip.TOO_LONG] += 1
            return
        self._waiting.append(job)
        self._worker.engine.wake()

    # --- on the engine thread

    def spare(self) -> bool:
        """One forward pass, or the beginning of a run; False when there is nothing to do."""
        if self._run is None and not self._waiting:
            return False
        started = self._clock()
        job = self._waiting[0] if self._run is None else self._run.job
        try:
            self._advance()
        except Exception as error:  # noqa: BLE001 - a check, or the memory that it lacks, never ends what is checked
            self._skip(Skip.FAILED)
            log.warning(
                "self_check_failed", request_id=job.request.request_id, error=f"{type(error).__name__}: {error}"
            )
        self.tally.seconds += self._clock() - started
        return True

    def let_go(self) -> None:
        """Gives the memory of the run under way back: the engine freezes, maybe because the worker is to sleep."""
        if self._run is not None:
            self._skip(Skip.PAUSED)

    def _advance(self) -> None:
        version = self._worker.description.weight_version
        if self._run is None:
            job = self._waiting.popleft()
            if job.versions == {version}:
                self._run = _Run(job, version, self._steps(job))
            else:
                self._skip(Skip.WEIGHTS)
        elif self._run.version != version:
            self._skip(Skip.WEIGHTS)
        else:
            self._go_on(self._run)

    def _steps(self, job: _Job) -> Generator[None, None, SoloResult]:
        """A solo run that goes on no longer than it takes to see that it does not end where it should."""
        request = job.request
        limit = min(request.sampling.max_tokens, len(job.served.tokens) + 1)
        store = self._new_store(len(request.prompt) + limit)
        eos_token_ids = frozenset(self._worker.description.eos_token_ids)
        return SoloRunner(self._worker.make_solo_runner(store), store, eos_token_ids).steps(
            request.prompt,
            replace(request.sampling, max_tokens=limit),
            request.routing_start,
            choice=job.choice,
            matcher=request.matcher,
            piece_tokens=PIECE_TOKENS,
        )

    def _new_store(self, num_tokens: int) -> KVStore:
        own = self._worker.store
        num_blocks = -(-num_tokens // own.layout.block_size) + 1  # one more for the null block
        return KVStore(own.layout, own.routing, num_blocks, own.device)

    def _go_on(self, run: _Run) -> None:
        request = run.job.request
        try:
            next(run.steps)
            return
        except StopIteration as end:
            solo = Told.of(end.value)
            found = compare(run.job.served, solo, len(request.prompt), request.routing_start)
            verdict = _Verdict(found, solo)
        except MoerelayError as error:
            found = {Kind.SOLO_RUN: len(request.prompt)}
            verdict = _Verdict(found, None, f"{type(error).__name__}: {error.message}")
        self._run = None
        self.tally.checked += 1
        for kind in found:
            self.tally.different[kind] += 1
        if found:
            self._writer.submit(self._report, run.job, verdict, self._worker.description)

    def _skip(self, cause: Skip) -> None:
        self._run = None
        self.tally.skipped[cause] += 1

    # --- on the writer's thread

    def _report(self, job: _Job, verdict: _Verdict, model: types_pb2.ModelDescription) -> None:
        """Ids and positions go into the log; what was said stays out of it."""
        request, path = job.request, None
        if self._files is not None:
            try:
                path = str(self._files.write(_reproducer(job, verdict, model)))
            except OSError as error:
                log.warning("self_check_file_failed", request_id=request.request_id, error=str(error))
        log.error(
            "self_check_difference",
            request_id=request.request_id,
            choice=job.choice,
            position=min(verdict.differences.values()),
            differences={kind.value: position for kind, position in verdict.differences.items()},
            num_prompt_tokens=len(request.prompt),
            weight_version=model.weight_version,
            solo_error=verdict.error,
            file=path,
        )


def _reproducer(job: _Job, verdict: _Verdict, model: types_pb2.ModelDescription) -> Reproducer:
    request = job.request
    return Reproducer(
        request_id=request.request_id,
        choice=job.choice,
        found_at=datetime.now(UTC).isoformat(timespec="seconds"),
        family=model.family,
        fingerprint=model.fingerprint,
        weight_version=model.weight_version,
        numerics=model.numerics,
        prompt=tuple(request.prompt),
        sampling=request.sampling,
        routing_start=request.routing_start,
        differences={kind.value: position for kind, position in verdict.differences.items()},
        served=PackedTold.pack(job.served),
        solo=None if verdict.solo is None else PackedTold.pack(verdict.solo),
        solo_error=verdict.error,
    )
