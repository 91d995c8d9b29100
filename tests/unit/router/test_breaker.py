"""A worker that answers heartbeats and fails requests is left alone, and tried again."""

import pytest

from common.errors import HandoffError, InternalError, InvalidRequestError, MoerelayError, OverloadedError
from common.pb import types_pb2
from router.breaker import FIRST_PAUSE_S, MAX_FAILURES, MAX_PAUSE_S, Breaker
from router.keys import FLEET
from tests.fakes.fake_workers import FakeWorker, Script
from tests.unit.router.cluster import over, running

BODY = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 4}}


def broken() -> Breaker:
    breaker = Breaker()
    for _ in range(MAX_FAILURES):
        breaker.failed(10.0)
    return breaker


def test_a_few_failures_change_nothing() -> None:
    breaker = Breaker()
    for _ in range(5):
        for _ in range(MAX_FAILURES - 1):
            breaker.failed(10.0)
        assert breaker.allows(10.0)
        breaker.succeeded()


def test_it_is_left_alone_for_a_while_then_tried_once() -> None:
    breaker = broken()
    assert not breaker.allows(10.0 + FIRST_PAUSE_S - 0.01)
    assert breaker.allows(10.0 + FIRST_PAUSE_S)
    breaker.taken(10.0 + FIRST_PAUSE_S)
    assert not breaker.allows(10.0 + FIRST_PAUSE_S)
    breaker.succeeded()
    assert breaker.allows(10.0 + FIRST_PAUSE_S)


def test_a_trial_that_never_ends_is_followed_by_another() -> None:
    breaker = broken()
    breaker.taken(11.0)
    assert breaker.allows(11.0 + FIRST_PAUSE_S)


def test_all_victims_of_one_incident_set_it_aside_once() -> None:
    """A failed step of an engine fails every request that was in it."""
    breaker = broken()
    for _ in range(20):
        breaker.failed(10.0)
    assert breaker.allows(10.0 + FIRST_PAUSE_S)
    breaker.taken(11.0)
    for _ in range(20):
        breaker.failed(11.5)  # the trial, and what came before it
    assert not breaker.allows(11.5 + 2 * FIRST_PAUSE_S - 0.01)
    assert breaker.allows(11.5 + 2 * FIRST_PAUSE_S)


def test_pauses_double_up_to_a_bound() -> None:
    breaker, now, pauses = broken(), 10.0, []
    for _ in range(7):
        pause = next(p for p in (1, 2, 4, 8, 16, 30) if breaker.allows(now + p))
        assert not breaker.allows(now + pause - 0.01)
        pauses.append(pause)
        now += pause
        breaker.taken(now)
        breaker.failed(now)
    assert pauses == [1, 2, 4, 8, 16, 30, 30]
    assert pauses[-1] == MAX_PAUSE_S


async def test_a_worker_that_fails_everything_does_not_draw_everything_to_itself() -> None:
    """It is always the least loaded, because it is done at once."""
    bad = FakeWorker("decode-0", types_pb2.ROLE_BOTH, Script(break_after=0, decode_error=InternalError("NaN")))
    good = FakeWorker("decode-1", types_pb2.ROLE_BOTH, Script())
    async with over([], [bad, good], placement="round_robin") as cluster:
        answers = [(await cluster.post(BODY))[0] for _ in range(20)]
    # A few more if the test takes so long that trials are due.
    assert MAX_FAILURES <= answers.count(500) == len(bad.decode_requests) <= MAX_FAILURES + 3
    assert answers.count(200) == len(good.decode_requests)


async def test_the_only_worker_is_never_set_aside() -> None:
    async with running(Script(break_after=0, decode_error=InternalError("NaN")), both=True) as cluster:
        answers = [(await cluster.post(BODY))[0] for _ in range(6)]
        assert answers == [500] * 6
        assert len(cluster.decode[0].decode_requests) == 6


@pytest.mark.parametrize("error", [InvalidRequestError("too long"), OverloadedError("full")])
async def test_refusals_are_no_failures(error: MoerelayError) -> None:
    async with running(Script(break_after=0, decode_error=error), both=True) as cluster:
        for _ in range(MAX_FAILURES):
            await cluster.post(BODY)
        assert not cluster.app[FLEET].workers[0].breaker.open


async def test_a_broken_handoff_counts_against_both_and_a_good_one_clears_the_name() -> None:
    """decode-0 breaks every handoff. Nobody knows whose fault it is, but prefill-0 succeeds with decode-1."""
    bad_script = Script(break_after=0, decode_error=HandoffError("no route"))
    bad = FakeWorker("decode-0", types_pb2.ROLE_DECODE, bad_script)
    good = FakeWorker("decode-1", types_pb2.ROLE_DECODE, Script())
    prefill = FakeWorker("prefill-0", types_pb2.ROLE_PREFILL, Script())
    async with over([prefill], [bad, good], placement="round_robin") as cluster:
        answers = [(await cluster.post(BODY))[0] for _ in range(2 * MAX_FAILURES)]
        assert answers.count(502) == MAX_FAILURES
        assert [w.id for w in cluster.app[FLEET].workers if w.breaker.open] == ["decode-0"]
