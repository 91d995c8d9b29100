"""The engine without its thread: scheduler, block pool, KV store, runner and sampler, driven by calls and steps.

A step is synchronous; commands come between steps. So an abort never frees blocks that a running step writes.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import structlog

from common.engine.admission import Admission
from common.engine.limits import EngineLimits
from common.engine.request import (
    BlocksLeased,
    EngineEvent,
    EngineLoad,
    EngineRequest,
    Failed,
    Progress,
    PromptAdvanced,
    RequestId,
    Work,
)
from common.engine.sampler import SampleSpec, sample
from common.engine.scheduler import ScheduledBatch, ScheduledChunk, Scheduler
from common.engine.sequence import Phase, SequenceState
from common.errors import HandoffCorruptError, InternalError, MoerelayError, RoutingMissingError
from common.kv.pool import BlockPool
from common.kv.store import KVStore, slots_of
from common.model.batch import Chunk, Runner
from common.routing.record import RoutingArray
from common.sampling import Finish, FinishReason, SampledToken, finish_after

_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class EngineStats:
    """Totals since the start. Written by the engine thread, readable by any."""

    #: Prompt positions forwarded here.
    prompt_tokens_computed: int = 0
    #: Tokens sampled here.
    generated_tokens: int = 0
    steps: int = 0
    #: Steps that forwarded at least one generated token.
    decode_steps: int = 0
    #: Routing rows that forward passes wrote into the store.
    routing_rows_captured: int = 0
    step_failures: int = 0


class EngineCore:
    """Everything one engine does, on one thread.

    Commands for ids that are not live are ignored: the request may have ended while the command was under way.
    """

    def __init__(
        self,
        runner: Runner,
        store: KVStore,
        pool: BlockPool,
        limits: EngineLimits,
        eos_token_ids: frozenset[int],
        admission: Admission,
    ) -> None:
        self.stats = EngineStats()
        self.observe_queue_time: Callable[[float], None] = _ignore
        self._runner = runner
        self._store = store
        self._scheduler = Scheduler(pool, limits, block_size=store.layout.block_size)
        self._eos_token_ids = eos_token_ids
        self._vocab_size = limits.vocab_size
        self._admission = admission
        self._events: list[EngineEvent] = []

    # --- commands

    def add(self, request: EngineRequest) -> None:
        """Takes a request that `Admission.enter` let in."""
        self._scheduler.add(request)

    def advance_handoff(self, request_id: RequestId, computed: int) -> None:
        """KV and rows of positions [0, computed) are in the leased slots."""
        if (sequence := self._scheduler.find(request_id)) is None:
            return
        if sequence.phase is not Phase.LEASED or not sequence.num_computed <= computed <= sequence.num_prompt:
            self._fail(sequence, _misplaced(sequence, f"a handoff of positions [0, {computed})"))
            return
        sequence.num_computed = computed
        self._report(sequence, None)

    def commit_handoff(self, request_id: RequestId, first_token: SampledToken) -> None:
        """The whole prompt is in the leased slots; decoding starts after `first_token`, if that does not end it."""
        if (sequence := self._scheduler.find(request_id)) is None:
            return
        if sequence.phase is not Phase.LEASED:
            self._fail(sequence, _misplaced(sequence, "the end of a handoff"))
            return
        if not 0 <= first_token.token_id < self._vocab_size:
            self._fail(sequence, HandoffCorruptError(f"the first token {first_token.token_id} is no vocabulary id"))
            return
        sequence.num_computed = sequence.num_prompt
        self._report(sequence, first_token)

    def abort(self, request_id: RequestId) -> None:
        """Ends the request with finish reason ABORT, whatever its phase."""
        if (sequence := self._scheduler.find(request_id)) is not None:
            self._end(sequence)
            self._events.append(Progress(request_id, (), None, Finish(FinishReason.ABORT)))

    def cancel(self, request_id: RequestId) -> None:
        """Ends the request without an event, whatever its phase."""
        if (sequence := self._scheduler.find(request_id)) is not None:
            self._end(sequence)

    # --- steps

    def step(self) -> bool:
        """Admits what fits, then computes one batch. False when nothing can be computed before the next command."""
        self._admit()
        batch = self._scheduler.schedule()
        if batch is None:
            return False
        try:
            self._advance(batch, self._compute(batch))
        except Exception as error:  # noqa: BLE001 - the engine's supervisor: one bad batch must not end the others
            self._fail_batch(batch, error)
        return True

    def take_events(self) -> list[EngineEvent]:
        """What happened since the last call, in order."""
        events, self._events = self._events, []
        return events

    def load(self) -> EngineLoad:
        return self._scheduler.load()

    def check_invariants(self) -> list[str]:
        """Violations, one sentence each; empty when all is well."""
        live = [s.request.request_id for s in self._scheduler.live]
        strangers = [f"sequence {i!r} is live but was not admitted" for i in live if not self._admission.is_live(i)]
        return self._scheduler.check_invariants() + strangers

    def _admit(self) -> None:
        for sequence in self._scheduler.admit():
            self.observe_queue_time(self._admission.seat(sequence.request.request_id))
            try:
                self._store.clear_blocks(sequence.blocks)
            except RuntimeError as error:  # what torch raises when a device is out of memory or broken
                _log.error("clearing blocks failed", request=sequence.request.request_id, exc_info=error)
                self._fail(sequence, InternalError(f"the KV cache failed: {type(error).__name__}"))
                continue
            if sequence.phase is Phase.LEASED:
                self._events.append(BlocksLeased(sequence.request.request_id, sequence.blocks))

    def _compute(self, batch: ScheduledBatch) -> list[SampledToken | MoerelayError]:
        """Runs the model; one result per chunk that samples, in order."""
        output = self._runner.execute([_as_chunk(c) for c in batch.chunks])
        specs = [self._spec(c.sequence) for c in batch.chunks if c.samples]
        return sample(output.logits_NV, specs) if specs else []

    def _spec(self, sequence: SequenceState) -> SampleSpec:
        return SampleSpec.of(
            sequence.request.sampling,
            self._eos_token_ids,
            token_ids=sequence.token_ids,
            num_prompt=sequence.num_prompt,
        )

    def _advance(self, batch: ScheduledBatch, results: Iterable[SampledToken | MoerelayError]) -> None:
        """Books what the step computed."""
        self._count(batch)
        remaining: Iterator[SampledToken | MoerelayError] = iter(results)
        for chunk in batch.chunks:
            result = next(remaining) if chunk.samples else None
            chunk.sequence.num_computed = chunk.end
            if isinstance(result, MoerelayError):
                self._fail(chunk.sequence, result)
            elif chunk.sequence.request.work is Work.PREFILL:
                self._report_prefill(chunk.sequence, result)
            else:
                self._report(chunk.sequence, result)

    def _count(self, batch: ScheduledBatch) -> None:
        stats = self.stats
        stats.steps += 1
        stats.decode_steps += any(c.sequence.phase is Phase.DECODING for c in batch.chunks)
        for chunk in batch.chunks:
            num_tokens = chunk.end - chunk.start
            stats.prompt_tokens_computed += num_tokens * (chunk.sequence.phase is Phase.PREFILLING)
            stats.generated_tokens += chunk.samples
            stats.routing_rows_captured += num_tokens * chunk.sequence.wants_rows

    # --- what a sequence tells

    def _report_prefill(self, sequence: SequenceState, first_token: SampledToken | None) -> None:
        if first_token is not None:
            sequence.token_ids.append(first_token.token_id)
            self._scheduler.hold(sequence)
        first_tokens = () if first_token is None else (first_token,)
        self._events.append(
            PromptAdvanced(sequence.request.request_id, sequence.blocks, sequence.num_computed, first_tokens)
        )

    def _report(self, sequence: SequenceState, token: SampledToken | None) -> None:
        """Tells a new token, if there is one, and every row that became final; ends or goes on."""
        try:
            rows_TLK = self._take_rows(sequence)
        except RoutingMissingError as error:
            self._fail(sequence, error)
            return
        finish = None if token is None else self._append(sequence, token)
        if token is not None or (rows_TLK is not None and len(rows_TLK)):
            tokens = () if token is None else (token,)
            self._events.append(Progress(sequence.request.request_id, tokens, rows_TLK, finish))

    def _append(self, sequence: SequenceState, token: SampledToken) -> Finish | None:
        """Adds the token and moves the sequence on: to its next step, or out."""
        sequence.token_ids.append(token.token_id)
        params = sequence.request.sampling
        finish = finish_after(params, self._eos_token_ids, token.token_id, sequence.num_generated)
        if finish is None:
            self._scheduler.start_decoding(sequence)
        else:
            self._end(sequence)
        return finish

    def _take_rows(self, sequence: SequenceState) -> RoutingArray | None:
        """Rows of the positions that were computed and not sent; None when no rows are wanted."""
        if not sequence.wants_rows:
            return None
        start, end = sequence.rows_sent, max(sequence.rows_sent, sequence.num_computed)
        sequence.rows_sent = end
        return self._store.read_rows(slots_of(sequence.blocks, start, end, self._store.layout.block_size))

    # --- ends

    def _end(self, sequence: SequenceState) -> None:
        """Frees everything the sequence holds, before anybody is told that it ended."""
        freed = self._scheduler.remove(sequence)
        self._store.free_blocks(freed)
        self._admission.leave(sequence.request.request_id)

    def _fail(self, sequence: SequenceState, error: MoerelayError) -> None:
        self._end(sequence)
        self._events.append(Failed(sequence.request.request_id, error))

    def _fail_batch(self, batch: ScheduledBatch, error: Exception) -> None:
        """Ends whatever the failed step left alive."""
        self.stats.step_failures += 1
        live = [c.sequence for c in batch.chunks if self._scheduler.find(c.sequence.request.request_id) is c.sequence]
        _log.error("step failed", requests=[s.request.request_id for s in live], exc_info=error)
        for sequence in live:
            self._fail(sequence, InternalError(f"the engine step failed: {type(error).__name__}"))


def _ignore(_: float) -> None:
    """Observes nothing."""


def _as_chunk(scheduled: ScheduledChunk) -> Chunk:
    sequence = scheduled.sequence
    return Chunk(
        token_ids=sequence.token_ids[scheduled.start : scheduled.end],
        start=scheduled.start,
        blocks=sequence.blocks,
        wants_logits=scheduled.samples,
        wants_rows=sequence.wants_rows,
    )


def _misplaced(sequence: SequenceState, what: str) -> InternalError:
    return InternalError(
        f"{what} came for a sequence that is {sequence.phase.value} "
        f"with {sequence.num_computed} of {sequence.num_prompt} prompt tokens"
    )
