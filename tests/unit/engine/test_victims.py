"""In which order sequences give way, and which of them would free nothing."""

from collections.abc import Sequence

from common.engine.sequence import Phase, SequenceState
from common.engine.victims import Victims
from common.kv.chain import Scope, TokenChain
from common.kv.pool import BlockId, BlockPool
from tests.unit.engine.rig import greedy, make_request


class Bench:
    """A pool, and sequences that hold blocks of it."""

    def __init__(self) -> None:
        self.pool = BlockPool(20)

    def blocks(self, count: int) -> tuple[BlockId, ...]:
        taken = self.pool.try_allocate(count)
        assert taken is not None
        return tuple(taken)

    def sequence(self, phase: Phase, arrival: int, blocks: Sequence[BlockId], *, choice: int = 0) -> SequenceState:
        """Shares `blocks`."""
        made = SequenceState(make_request(f"r{arrival}", [5], greedy(2)), arrival, TokenChain(Scope(""), 4), 0)
        made.urgency, made.phase, made.blocks = (0, arrival, choice), phase, tuple(blocks)
        self.pool.share(blocks)
        return made

    def order(self, victims: Victims) -> list[tuple[int, int]]:
        """Arrival and choice of everybody, as they are taken."""
        taken = []
        while (victim := victims.pop()) is not None:
            self.pool.release(victim.blocks)
            victims.took(victim)
            taken.append(victim.urgency[1:])
        return taken


def test_the_least_urgent_is_taken_first_whether_it_runs_or_waits() -> None:
    bench = Bench()
    prompt = bench.blocks(2)
    seated = [bench.sequence(Phase.DECODING, arrival, bench.blocks(2)) for arrival in (4, 1)]
    forks = [bench.sequence(Phase.FORKED, 2, prompt, choice=choice) for choice in (1, 3)]
    bench.pool.release(prompt)
    assert bench.order(Victims(bench.pool, seated, forks)) == [(4, 0), (2, 3), (2, 1), (1, 0)]


def test_choices_give_way_only_after_everybody_else_who_holds_their_prompt() -> None:
    """Choice 0 decodes with the prompt, and somebody of a later request has its beginning; that one is no victim."""
    bench = Bench()
    prompt, other = bench.blocks(2), bench.blocks(2)
    decoding = bench.sequence(Phase.DECODING, 1, (*prompt, *bench.blocks(1)))
    forks = [bench.sequence(Phase.FORKED, 1, prompt, choice=choice) for choice in (1, 2)]
    leased = bench.sequence(Phase.LEASED, 3, other)
    forks.append(bench.sequence(Phase.FORKED, 2, other, choice=1))
    bench.pool.release((*prompt, *other))
    assert bench.order(Victims(bench.pool, [decoding], forks)) == [(1, 0), (1, 2), (1, 1)]
    assert bench.pool.num_references(leased.blocks[0]) == 2


def test_choices_whose_prompt_the_asker_wants_are_left_alone() -> None:
    bench = Bench()
    prompts = [bench.blocks(2) for _ in range(2)]
    forks = [bench.sequence(Phase.FORKED, i, prompt, choice=1) for i, prompt in enumerate(prompts)]
    for prompt in prompts:
        bench.pool.release(prompt)
    assert bench.order(Victims(bench.pool, (), forks, wanted={*prompts[1]})) == [(0, 1)]
