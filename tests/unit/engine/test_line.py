"""The order of the waiting line, and the account of what preempted sequences keep."""

import random

from common.engine.line import WaitingLine
from common.engine.sequence import Phase, SequenceState
from common.engine.swap import SwapSpace
from common.kv.chain import Scope, TokenChain
from tests.unit.engine.rig import greedy, make_request


def sequence(priority: int, arrival: int, choice: int = 0, *, start: int | None = 0) -> SequenceState:
    chain = TokenChain(Scope(""), 4)
    made = SequenceState(make_request("a", [5], greedy(2), start=start), arrival, chain, 0)
    made.urgency = (priority, arrival, choice)
    return made


def test_the_line_is_in_order_whoever_comes_and_leaves() -> None:
    keys = [(priority, arrival, choice) for priority in (-1, 0, 3) for arrival in range(4) for choice in range(2)]
    everybody = [sequence(*key) for key in keys]
    line, order = WaitingLine(), list(everybody)
    random.Random(0).shuffle(order)
    for each in order:
        line.add(each)
    assert list(line) == everybody
    for each in order[:10]:
        line.remove(each)
    left = [each for each in everybody if each not in order[:10]]
    assert list(line) == left
    assert line.head is left[0]


def test_an_empty_line_has_no_head() -> None:
    line, one = WaitingLine(), sequence(0, 1)
    line.add(one)
    line.remove(one)
    assert line.head is None


def test_swap_space_keeps_to_its_limit_unless_it_must_not() -> None:
    space = SwapSpace(100, kv_token_bytes=16, row_bytes=4)
    with_rows, without = sequence(0, 1), sequence(0, 2, start=None)
    with_rows.num_computed, without.num_computed = 3, 3
    assert (space.size_of(with_rows), space.size_of(without)) == (60, 48)
    assert space.try_take(with_rows)
    assert not space.try_take(without)
    assert space.used_bytes == 60
    space.take(without)
    with_rows.phase = without.phase = Phase.PREEMPTED
    assert space.check_invariants([with_rows, without]) == []
    assert space.check_invariants([with_rows]) == ["108 saved bytes are counted instead of 60"]
    space.give_back(with_rows)
    space.give_back(without)
    assert space.used_bytes == 0
