"""Preempted sequences that end, by themselves or not, leave nothing."""

import pytest

from common.engine.request import RequestId
from common.errors import InternalError
from common.sampling import Finish, FinishReason
from tests.unit.engine.crowded import (
    NOTHING,
    PLENTY,
    assert_solo,
    rig_of,
    two_that_do_not_fit,
)
from tests.unit.engine.rig import (
    FakeRig,
    Transcript,
    limits,
)


@pytest.mark.parametrize("silently", [False, True])
@pytest.mark.parametrize("swap", [NOTHING, PLENTY])
def test_a_preempted_request_ends_and_leaves_nothing(swap: int, silently: bool) -> None:
    rig = rig_of(7, swap=swap)
    a, b = two_that_do_not_fit(rig)
    assert (rig.core.load().swap_bytes_used > 0) == (swap > 0)
    told = len(b.tokens)
    if silently:
        rig.cancel(RequestId("b"))
    else:
        rig.core.abort(RequestId("b"))
        rig.deliver()
        assert b.finish == Finish(FinishReason.ABORT)
    assert sum(len(rows) for rows in b.rows) == 6 + told - 1
    assert rig.core.load().swap_bytes_used == 0
    rig.run()
    assert_solo(a)
    rig.assert_baseline()


def recomputing(rig: FakeRig) -> Transcript:
    """One request whose positions are being computed again; the budget is 2 tokens per step."""
    a, b = two_that_do_not_fit(rig)
    rig.cancel(a.request.request_id)
    rig.step()
    assert rig.core.load().preempted == 0
    assert rig.core.stats.recomputed_tokens == 2
    return b


def slow_rig() -> FakeRig:
    bounds = limits(max_num_batched_tokens=2, swap_space_bytes=NOTHING)
    return FakeRig(num_blocks=7, bounds=bounds, prefix_caching=False)


def test_an_abort_while_recomputing_leaves_nothing() -> None:
    rig = slow_rig()
    b = recomputing(rig)
    rig.core.abort(RequestId("b"))
    rig.deliver()
    assert b.finish == Finish(FinishReason.ABORT)
    rig.assert_baseline()


def test_a_step_that_fails_while_recomputing_fails_the_request() -> None:
    rig = slow_rig()
    b = recomputing(rig)
    rig.runner.fails_on = lambda chunks: True
    rig.run()
    assert isinstance(b.error, InternalError)
    rig.assert_baseline()
