"""What the tests of the scheduler share: rounds that compute nothing."""

from dataclasses import replace

from common.engine.batch import ScheduledBatch
from common.engine.group import ChoiceGroup
from common.engine.pace import Pace
from common.engine.request import RequestId, Work
from common.engine.scheduler import Scheduler
from common.engine.sequence import SequenceState
from common.engine.step_fit import StepTimeFit
from common.engine.swap import SwapSpace
from common.kv.cache import PrefixCache
from common.kv.pool import BlockPool
from tests.unit.engine.rig import greedy, limits, make_request


class Bench:
    """A scheduler with a pool of `num_blocks` usable blocks of four tokens, and steps that compute nothing."""

    def __init__(
        self,
        *,
        num_blocks: int = 32,
        budget: int = 8,
        seats: int = 8,
        swap_space_bytes: int = 2**20,
        pace: Pace | None = None,
        max_mixed_prefill_tokens: int | None = None,
    ) -> None:
        self.pool = BlockPool(num_blocks + 1)
        bounds = limits(max_num_batched_tokens=budget, max_num_seqs=seats)
        bounds = replace(bounds, max_mixed_prefill_tokens=max_mixed_prefill_tokens)
        cache = PrefixCache(self.pool, 4, lambda block: False, enabled=False)
        pace = pace or Pace(StepTimeFit(8, 2), bounds.objectives)
        self.scheduler = Scheduler(self.pool, bounds, cache, SwapSpace(swap_space_bytes, 8, 4), pace)
        #: Positions that the round after the last one was said to compute.
        self.foretold: list[tuple[int, int]] = []

    def add(
        self, name: str, num_prompt: int, max_tokens: int = 4, work: Work = Work.WHOLE, *, priority: int = 0
    ) -> None:
        request = make_request(name, [5] * num_prompt, greedy(max_tokens), work=work)
        self.scheduler.add(replace(request, priority=priority))

    def admit(self) -> list[str]:
        return [s.request.request_id for s in self.scheduler.admit()]

    def plan(self) -> list[tuple[str, int, int]]:
        """One round as (name, start, end), then booked as if it had been computed."""
        self.admit()
        self.scheduler.grow()
        batch = self.scheduler.schedule()
        self.foretold = [(chunk.start, chunk.end) for chunk in self.scheduler.forecast(batch)] if batch else []
        planned = [(c.sequence.request.request_id, c.start, c.end) for c in batch.chunks] if batch else []
        if batch:
            self._book(batch)
        assert self.scheduler.check_invariants() == []
        return [(str(name), start, end) for name, start, end in planned]

    def _book(self, batch: ScheduledBatch) -> None:
        for chunk in batch.chunks:
            samples, sequence = chunk.samples, chunk.sequence
            self.scheduler.advance(sequence, chunk.end)
            if samples:
                self._move_on(sequence)

    def _move_on(self, sequence: SequenceState) -> None:
        group = self.group(str(sequence.request.request_id))
        if sequence.request.work is Work.PREFILL:
            self.scheduler.hold(sequence)
            return
        sequence.token_ids.append(7)
        group.is_forked = True
        if sequence.num_generated == sequence.request.sampling.max_tokens:
            self.scheduler.remove_group(group)
        else:
            self.scheduler.start_decoding(sequence)

    def group(self, name: str) -> ChoiceGroup:
        found = self.scheduler.find(RequestId(name))
        assert found is not None
        return found

    def sequence(self, name: str) -> SequenceState:
        """Choice 0 of a request."""
        return self.group(name).sequences[0]
