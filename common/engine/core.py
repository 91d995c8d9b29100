"""The engine without its thread: scheduler, block pool, KV store, runner and sampler, driven by calls and steps.

A step is synchronous; commands come between steps. So an abort never frees blocks that a running step writes.
"""

import time
from collections.abc import Callable, Iterable, Sequence

import structlog

from common.engine.admission import Admission
from common.engine.batch import ScheduledBatch
from common.engine.compute import ComputedChunk, compute
from common.engine.faults import OUT_OF_MEMORY, memory_failure
from common.engine.group import ChoiceGroup
from common.engine.handed_over import is_of_other_weights, misplaced, problem_of
from common.engine.limits import EngineLimits
from common.engine.moves import BlockMover
from common.engine.objectives import Attainment
from common.engine.pace import Pace
from common.engine.preemption_log import PreemptionLog
from common.engine.reporter import Reporter
from common.engine.request import (
    BlocksLeased,
    EngineEvent,
    EngineLoad,
    EngineRequest,
    PrefillsLocally,
    RequestId,
    Work,
)
from common.engine.scheduler import Scheduler
from common.engine.sequence import Phase, SequenceState
from common.engine.stages import StageObserver
from common.engine.stats import EngineStats
from common.engine.step_fit import StepTimeFit
from common.engine.swap import SwapSpace
from common.errors import HandoffCorruptError, InternalError, MoerelayError, RoutingMissingError
from common.kv.cache import PrefixCache
from common.kv.pool import BlockPool
from common.kv.store import KVStore
from common.model.batch import Runner
from common.sampling import SampledToken

_log = structlog.get_logger(__name__)


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
        *,
        prefix_caching: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stats = EngineStats()
        self._runner = runner
        self._store = store
        self._cache = PrefixCache(pool, store.layout.block_size, store.has_rows, enabled=prefix_caching)
        swap = SwapSpace(limits.swap_space_bytes, store.layout.token_bytes, store.routing.row_bytes)
        self.step_fit = StepTimeFit(store.routing.num_experts, store.routing.top_k)
        self.attainment = Attainment(limits.objectives)
        self._clock = clock
        pace = Pace(self.step_fit, limits.objectives, limits.max_mixed_prefill_tokens, limits.max_contended_step_s)
        self._scheduler = Scheduler(pool, limits, self._cache, swap, pace)
        self._mover = BlockMover(store, pool, self.stats, PreemptionLog(self.stats, swap))
        self._eos_token_ids = eos_token_ids
        self._vocab_size = limits.vocab_size
        self._admission = admission
        self._reporter = Reporter(self._scheduler, store, admission, eos_token_ids, self.attainment)
        #: Labels of all weights that were in use here; replaced, never changed, so any thread may read it.
        self.known_weight_versions: frozenset[str] = frozenset({""})

    @property
    def weight_version(self) -> str:
        """Label of the weights in use, which every token sampled from now on carries; set between steps.

        Setting it empties the prefix cache: what was computed before is of other weights.
        """
        return self._cache.weight_version

    @weight_version.setter
    def weight_version(self, version: str) -> None:
        assert not self._scheduler.has_recomputation(), "KV that is gone cannot be computed with other weights"
        self.known_weight_versions |= {version}
        self._store.free_blocks(self._cache.use_weights(version))

    @property
    def observer(self) -> StageObserver:
        """Is told how long each stage of a request took."""
        return self._reporter.observer

    @observer.setter
    def observer(self, observer: StageObserver) -> None:
        self._reporter.observer = observer

    def reset_prefix_cache(self) -> int:
        """Forgets every cached prefix; live sequences go on, and add nothing. Number of blocks that became free."""
        freed = self._cache.flush()
        self._store.free_blocks(freed)
        return len(freed)

    # --- commands

    def add(self, request: EngineRequest) -> None:
        """Takes a request that `Admission.enter` let in."""
        self._scheduler.add(request)

    def advance_handoff(self, request_id: RequestId, computed: int) -> None:
        """KV and rows of positions [0, computed) are in the leased slots."""
        if (group := self._scheduler.find(request_id)) is None:
            return
        prompt = group.sequences.get(0)
        if (
            prompt is None
            or prompt.phase is not Phase.LEASED
            or not prompt.num_computed <= computed <= prompt.num_prompt
        ):
            self._reporter.fail(group, misplaced(group, f"a handoff of positions [0, {computed})"))
            return
        prompt.num_computed = computed
        try:
            self._reporter.prompt_advanced(group, None)
        except RoutingMissingError as error:
            self._reporter.fail(group, error)

    def commit_handoff(self, request_id: RequestId, first_tokens: Sequence[SampledToken], num_cached: int = 0) -> None:
        """The whole prompt is in the leased slots; each choice goes on after its first token, unless that ends it.

        `num_cached`: prompt tokens that were not computed for this request where the handoff comes from.
        """
        if (group := self._scheduler.find(request_id)) is None:
            return
        prompt = group.sequences.get(0)
        if prompt is None or prompt.phase is not Phase.LEASED:
            self._reporter.fail(group, misplaced(group, "the end of a handoff"))
            return
        try:
            self._take_over(group, prompt, first_tokens, num_cached)
        except MoerelayError as error:
            self._reporter.fail(group, error)
        except OUT_OF_MEMORY as error:
            _, failure = memory_failure(prompt, "taking a handoff over", "give the worker more host memory", error)
            self._reporter.fail(group, failure)

    def _take_over(
        self, group: ChoiceGroup, prompt: SequenceState, first_tokens: Sequence[SampledToken], num_cached: int
    ) -> None:
        """Raises HandoffCorruptError, or what a grammar that is too much for the parser or a missing row causes."""
        if problem := problem_of(prompt, first_tokens, self._vocab_size):
            raise HandoffCorruptError(problem)
        if is_of_other_weights(prompt, first_tokens):
            prompt.epoch = prompt.weights = None
        self._cache_full_blocks(prompt)
        prompt.num_computed, prompt.num_cached = prompt.num_prompt, num_cached
        self._reporter.first_tokens(group, first_tokens, None)

    def abort(self, request_id: RequestId, choice: int | None = None) -> None:
        """Ends one choice, or all that are live, with finish reason ABORT, whatever their phase."""
        if (group := self._scheduler.find(request_id)) is None:
            return
        choices = sorted(group.open) if choice is None else sorted(group.open & {choice})
        if choices:
            self._reporter.abort(group, choices)

    def cancel(self, request_id: RequestId) -> None:
        """Ends the request without an event, whatever its phase."""
        if (group := self._scheduler.find(request_id)) is not None:
            self._reporter.end(group)

    # --- steps

    def close_admission(self) -> None:
        """Only prompts that other workers wait for, and preempted sequences, still come in; what is in goes on."""
        self._scheduler.closed = True
        self._admission.stand_still()

    def open_admission(self) -> None:
        """Undoes `close_admission`."""
        self._scheduler.closed = False
        self._admission.go_on()

    def has_open_prompts(self) -> bool:
        """A prompt is being computed, is on its way here, or is waited for elsewhere; or a sequence is recomputed."""
        return self._scheduler.has_open_prompts()

    def step(self) -> bool:
        """Admits what fits, then computes one batch. False when nothing can be computed before the next command."""
        started = self._clock()
        batch = self._next_batch()
        if self._admission.prospect.enabled:
            self._admission.prospect.backlog = self._scheduler.backlog()
        if batch is None:
            return False
        try:
            self._runner.prepare(self._scheduler.forecast(batch))
            computed = compute(self._runner, batch, self._eos_token_ids, self.weight_version)
            self.stats.count(batch)
            self._advance(computed)
            if (seconds := self._clock() - started) > 0:
                self.step_fit.observe(batch.work, seconds)
        except Exception as error:  # noqa: BLE001 - the engine's supervisor: one bad batch must not end the others
            self._fail_batch(batch, error)
        return True

    def _next_batch(self) -> ScheduledBatch | None:
        """The next step, all of whose sequences have the blocks that they need."""
        while True:
            moved = self._admit()
            moved |= self._grow()
            batch = self._scheduler.schedule()
            if batch is not None or not moved:
                return batch
            # Whoever could run gave its blocks up, or failed: there may be room for others now.

    def take_events(self) -> list[EngineEvent]:
        """What happened since the last call, in order."""
        events, self._reporter.events = self._reporter.events, []
        return events

    def load(self) -> EngineLoad:
        return self._scheduler.load()

    def check_invariants(self) -> list[str]:
        """Violations, one sentence each; empty when all is well."""
        live, block_size = self._scheduler.live, self._cache.block_size
        names = [group.request.request_id for group in live]
        found = [f"request {i!r} is live but was not admitted" for i in names if not self._admission.is_live(i)]
        for sequence in [s for group in live for s in group.sequences.values()]:
            found += sequence.saved_violations(block_size)
        return self._scheduler.check_invariants() + found

    def _admit(self) -> bool:
        """Lets in who fits; whether others lost blocks or failed."""
        admitted = self._scheduler.admit()
        moved = self._carry_out(admitted)
        for sequence in admitted:
            group = self._scheduler.find(sequence.request.request_id)
            if group is not None and not group.is_forked:
                self._tell_admission(group, sequence)
        return moved

    def _tell_admission(self, group: ChoiceGroup, prompt: SequenceState) -> None:
        request = prompt.request
        group.seated_s = self._admission.seat(request.request_id)
        self.observer.seated(request.request_id, group.seated_s)
        self._count_hits(prompt)
        self._admission.prospect.seated(prompt.num_prompt, prompt.num_cached)
        if prompt.phase is Phase.LEASED:
            self._reporter.events.append(BlocksLeased(request.request_id, prompt.blocks, prompt.num_cached))
        elif request.work is Work.DECODE:
            self._reporter.events.append(PrefillsLocally(request.request_id, prompt.num_cached))

    def _grow(self) -> bool:
        """Makes room for the next tokens; whether somebody lost blocks or failed."""
        self._scheduler.grow()
        return self._carry_out()

    def _carry_out(self, admitted: Sequence[SequenceState] = ()) -> bool:
        changes = self._scheduler.take_changes()
        failures = self._mover.carry_out(changes, admitted)
        for sequence, error in failures:
            if (group := self._scheduler.find(sequence.request.request_id)) is not None:
                self._reporter.fail(group, error)
        return bool(changes.preempted or failures)

    def _count_hits(self, sequence: SequenceState) -> None:
        if self._cache.enabled and sequence.request.sampling.prompt_logprobs is None:
            self.stats.prefix_cache_queries += sequence.num_prompt
            self.stats.prefix_cache_hits += sequence.num_cached

    def _advance(self, computed: Iterable[ComputedChunk]) -> None:
        """Books what a step computed; requests end or go on."""
        for outcome in computed:
            sequence = outcome.chunk.sequence
            group = self._scheduler.find(sequence.request.request_id)
            if group is None:  # another of its choices has failed in this step
                continue
            self._scheduler.advance(sequence, outcome.chunk.end)
            if outcome.error is None:
                self._cache_full_blocks(sequence, outcome.chunk.start)
            try:
                self._report(group, outcome)
            except MoerelayError as error:
                self._reporter.fail(group, error)

    def _cache_full_blocks(self, sequence: SequenceState, start: int = 0) -> None:
        """Offers the full blocks to the prefix cache, if positions from `start` on have filled one.

        KV that is, or may be, of other weights than those in use stays out.
        """
        num_full = sequence.num_computed // self._cache.block_size
        if sequence.epoch != self._cache.epoch or num_full <= start // self._cache.block_size:
            return
        sequence.chain.grow(sequence.token_ids, sequence.num_computed)
        self._store.free_blocks(self._cache.add(sequence.chain, sequence.blocks[:num_full]))

    def _report(self, group: ChoiceGroup, outcome: ComputedChunk) -> None:
        if outcome.error is not None:
            raise outcome.error
        if group.request.work is Work.PREFILL:
            self._reporter.prefilled(group, outcome.tokens, outcome.prompt_logprobs)
        elif group.is_forked:
            if outcome.tokens:  # none before the end of what is recomputed
                self._reporter.token(group, outcome.chunk.sequence, outcome.tokens[0])
        elif outcome.tokens:
            self._reporter.first_tokens(group, outcome.tokens, outcome.prompt_logprobs)
        else:
            self._reporter.prompt_advanced(group, outcome.prompt_logprobs)

    def _fail_batch(self, batch: ScheduledBatch, error: Exception) -> None:
        """Ends whatever the failed step left alive."""
        self.stats.step_failures += 1
        names = dict.fromkeys(c.sequence.request.request_id for c in batch.chunks)
        live = [group for name in names if (group := self._scheduler.find(name)) is not None]
        _log.error("step failed", requests=[group.request.request_id for group in live], exc_info=error)
        for group in live:
            self._reporter.fail(group, InternalError(f"the engine step failed: {type(error).__name__}"))
