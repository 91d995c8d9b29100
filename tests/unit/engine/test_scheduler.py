"""Who is admitted when, and what each round computes."""

import pytest

from common.engine.request import RequestId, Work
from common.engine.sequence import Phase
from tests.unit.engine.bench import Bench


def test_decodes_come_first_then_prompt_chunks_in_order() -> None:
    bench = Bench(budget=8)
    bench.add("a", 3)
    assert bench.plan() == [("a", 0, 3)]
    bench.add("b", 10)
    bench.add("c", 4)
    assert bench.plan() == [("a", 3, 4), ("b", 0, 7)]
    assert bench.plan() == [("a", 4, 5), ("b", 7, 10), ("c", 0, 4)]
    assert bench.plan() == [("a", 5, 6), ("b", 10, 11), ("c", 4, 5)]


def test_a_budget_of_one_token_finishes_everything() -> None:
    bench = Bench(budget=1)
    bench.add("a", 3, max_tokens=2)
    bench.add("b", 1, max_tokens=1)
    rounds = [bench.plan() for _ in range(6)]
    assert rounds == [[("a", 0, 1)], [("a", 1, 2)], [("a", 2, 3)], [("a", 3, 4)], [("b", 0, 1)], []]


def test_the_prompts_blocks_are_taken_at_admission() -> None:
    bench = Bench(num_blocks=8)
    bench.add("a", 6, max_tokens=4)
    bench.add("p", 6, max_tokens=4, work=Work.PREFILL)
    bench.add("d", 6, max_tokens=4, work=Work.DECODE)
    assert bench.admit() == ["a", "p", "d"]
    assert [len(bench.sequence(n).blocks) for n in "apd"] == [2, 2, 2]
    assert bench.sequence("d").phase is Phase.LEASED


def test_the_line_waits_for_blocks_and_nobody_overtakes() -> None:
    bench = Bench(num_blocks=4)
    bench.add("a", 8, max_tokens=5)
    bench.add("large", 8, max_tokens=9)
    bench.add("small", 1, max_tokens=1)
    assert bench.admit() == ["a"]
    bench.scheduler.remove_group(bench.group("a"))
    assert bench.admit() == ["large", "small"]


def test_the_line_is_ordered_by_priority_then_arrival() -> None:
    bench = Bench(seats=1)
    for name, priority in [("a", 0), ("b", 5), ("c", -1), ("d", 0), ("e", -1), ("f", 5)]:
        bench.add(name, 1, max_tokens=1, priority=priority)
    order = []
    while bench.scheduler.live:
        order += [name for name, _, _ in bench.plan()]
    assert order == ["c", "e", "a", "d", "b", "f"]


def test_removing_from_the_middle_of_the_line_keeps_its_order() -> None:
    bench = Bench(seats=1)
    for name in "abcd":
        bench.add(name, 1, max_tokens=1)
    bench.scheduler.remove_group(bench.group("b"))
    assert bench.scheduler.check_invariants() == []
    assert [bench.plan()[0][0] for _ in range(3)] == ["a", "c", "d"]


@pytest.mark.parametrize(("budget", "seats"), [(8, 2), (2, 8)])
def test_seats_are_bounded_by_the_setting_and_by_the_budget(budget: int, seats: int) -> None:
    bench = Bench(budget=budget, seats=seats)
    for name in "abc":
        bench.add(name, 1, max_tokens=2)
    assert bench.admit() == ["a", "b"]
    assert [name for name, _, _ in bench.plan()] == ["a", "b"]
    assert [name for name, _, _ in bench.plan()] == ["a", "b"]
    assert bench.plan() == [("c", 0, 1)]


def test_a_prompt_progresses_beside_a_full_house_of_decodes() -> None:
    bench = Bench(budget=3, seats=3)
    for name in "ab":
        bench.add(name, 1, max_tokens=20)
    bench.plan()
    bench.add("late", 3)
    assert [bench.plan()[2] for _ in range(3)] == [("late", 0, 1), ("late", 1, 2), ("late", 2, 3)]


def test_a_lease_keeps_its_seat_and_is_never_scheduled() -> None:
    bench = Bench(seats=1)
    bench.add("d", 3, work=Work.DECODE)
    bench.add("a", 3)
    assert bench.plan() == []
    leased = bench.sequence("d")
    leased.num_computed = 3
    leased.token_ids.append(9)
    bench.group("d").is_forked = True
    bench.scheduler.start_decoding(leased)
    assert bench.plan() == [("d", 3, 4)]


def test_a_held_prefill_keeps_its_blocks_but_not_its_seat() -> None:
    bench = Bench(num_blocks=2, seats=1)
    bench.add("p", 4, work=Work.PREFILL)
    bench.add("q", 4, work=Work.PREFILL)
    assert bench.plan() == [("p", 0, 4)]
    assert bench.plan() == [("q", 0, 4)]
    assert bench.scheduler.load().handoffs == 2
    assert bench.pool.num_free == 0


def test_removing_returns_the_blocks_that_became_free() -> None:
    bench = Bench()
    bench.add("a", 6)
    bench.add("waiting", 120)
    bench.admit()
    a, waiting = bench.group("a"), bench.group("waiting")
    blocks = a.sequences[0].blocks
    assert bench.scheduler.remove_group(waiting) == []
    assert sorted(bench.scheduler.remove_group(a)) == sorted(blocks)
    assert bench.scheduler.live == []
    assert bench.pool.num_used == 0


def test_whoever_comes_in_leaves_a_block_for_each_that_grows() -> None:
    bench = Bench(num_blocks=6, budget=32)
    bench.add("a", 8, max_tokens=9)
    bench.add("b", 4, max_tokens=2)
    bench.add("c", 4, max_tokens=2)
    bench.add("d", 4, max_tokens=1)
    # "a" takes 2 of 6 blocks, "b" 1 and leaves one for each of both; "c" would leave 2 for three.
    assert bench.admit() == ["a", "b"]
    bench.scheduler.remove_group(bench.group("c"))
    # "d" never grows: it may leave just two.
    assert bench.admit() == ["d"]


@pytest.mark.parametrize(("num_blocks", "held"), [(8, [2, 3, 3, 3, 3, 4, 4, 4, 0]), (4, [2, 3, 3, 3, 3, 3, 4, 4, 0])])
def test_a_sequence_grows_when_its_blocks_are_full(num_blocks: int, held: list[int]) -> None:
    """A step ahead, as long as there are plenty. 15 positions: the last token is forwarded nowhere."""
    bench = Bench(num_blocks=num_blocks, budget=32)
    bench.add("a", 7, max_tokens=9)
    got = []
    for _ in held:
        bench.plan()
        got.append(bench.pool.num_used)
    assert got == held


def test_the_least_urgent_is_put_back_and_returns_to_its_place() -> None:
    bench = Bench(num_blocks=5, budget=32)
    bench.add("a", 4, max_tokens=13)
    bench.add("b", 4, max_tokens=13)
    rounds = [[name for name, _, _ in bench.plan()] for _ in range(12)]
    # Both have two blocks for 8 tokens; "a" gets the fifth for its ninth, and "b" finds none.
    assert rounds == [["a", "b"]] * 5 + [["a"]] * 7
    assert bench.sequence("b").phase is Phase.PREEMPTED
    assert (bench.sequence("b").blocks, bench.sequence("b").num_computed) == ((), 8)
    bench.add("late", 4, max_tokens=1)
    assert bench.plan() == [("a", 15, 16)]
    assert bench.plan() == [("b", 8, 9), ("late", 0, 4)]


def test_a_sequence_without_a_copy_is_computed_again_behind_the_decodes() -> None:
    bench = Bench(num_blocks=5, budget=4, swap_space_bytes=0)
    bench.add("a", 4, max_tokens=13)
    bench.add("b", 4, max_tokens=13)
    while bench.scheduler.find(RequestId("a")):
        bench.plan()
    assert (bench.sequence("b").phase, bench.sequence("b").num_computed) == (Phase.PREEMPTED, 0)
    assert bench.scheduler.has_open_prompts()
    bench.add("c", 1, max_tokens=4)
    known = len(bench.sequence("b").token_ids)
    assert known == 9
    assert bench.plan() == [("b", 0, 4)]
    assert bench.plan() == [("b", 4, 8)]
    assert not bench.scheduler.has_recomputation()
    assert bench.plan() == [("b", 8, 9), ("c", 0, 1)]


@pytest.mark.parametrize("swap_space_bytes", [0, 2**20])
def test_a_closed_door_lets_in_only_what_a_freeze_waits_for(swap_space_bytes: int) -> None:
    """A preempted sequence with a copy needs nothing, and would only take blocks from those that do."""
    bench = Bench(num_blocks=5, budget=32, swap_space_bytes=swap_space_bytes)
    bench.add("a", 4, max_tokens=13)
    bench.add("b", 4, max_tokens=13)
    while not bench.scheduler.load().preempted:
        bench.plan()
    bench.scheduler.closed = True
    bench.add("urgent", 1, priority=-1)
    bench.add("awaited", 1, work=Work.PREFILL)
    bench.scheduler.remove_group(bench.group("a"))
    assert bench.admit() == (["awaited"] if swap_space_bytes else ["b", "awaited"])


def test_behind_a_closed_door_the_budget_is_for_what_a_freeze_waits_for() -> None:
    bench = Bench(budget=4)
    bench.add("a", 1)
    bench.plan()
    bench.add("b", 7)
    assert bench.plan() == [("a", 1, 2), ("b", 0, 3)]
    bench.scheduler.closed = True
    assert bench.plan() == [("b", 3, 7)]


def test_invariants_name_what_is_broken() -> None:
    bench = Bench()
    bench.add("a", 6)
    bench.plan()
    sequence = bench.sequence("a")
    sequence.num_computed = 2
    assert bench.scheduler.check_invariants() == [
        "sequence 'a' is decoding with 2 computed of 6 prompt and 1 generated tokens"
    ]
    sequence.num_computed = 6
    sequence.phase = Phase.LEASED
    assert "sequence 'a' is leased, which whole work never is" in bench.scheduler.check_invariants()
    sequence.phase = Phase.DECODING
    bench.pool.release(sequence.blocks[:1])
    assert f"block {sequence.blocks[0]} has 0 references but 1 holders" in bench.scheduler.check_invariants()
