"""Sequences that lose their blocks and go on later: nobody can tell from their tokens and rows."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import structlog
from structlog.typing import EventDict

from common.engine.request import RequestId, Work
from common.sampling import SamplingParams
from tests.unit.engine.crowded import (
    NOTHING,
    PLENTY,
    POSITION_BYTES,
    assert_solo,
    prompt_of,
    rig_of,
    run_until_preempted,
)
from tests.unit.engine.rig import (
    RigPair,
    greedy,
    make_request,
    solo,
)


@pytest.fixture
def logs() -> Iterator[list[EventDict]]:
    """What was logged; the names of preempted requests are read from it."""
    with structlog.testing.capture_logs() as entries:
        yield entries


def preempted(logs: Sequence[EventDict]) -> list[str]:
    return [str(entry["request"]) for entry in logs if entry["event"] == "preempted"]


# --- the answers


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("swap", [NOTHING, 50 * POSITION_BYTES, PLENTY])
def test_every_row_survives_preemption(swap: int, prefix_caching: bool) -> None:
    """vllm-project/vllm#39917, #39568: 6 requests of 90 positions each in a pool of 192."""
    rig = rig_of(12, swap=swap, block_size=16, prefix_caching=prefix_caching)
    got = [rig.submit(make_request(f"r{i}", prompt_of(30, i), greedy(60))) for i in range(6)]
    rig.run()
    assert rig.core.stats.preemptions > 0
    for transcript in got:
        assert transcript.rows_TLK is not None
        assert len(transcript.rows_TLK) == 30 + 60 - 1
    assert_solo(*got)
    rig.assert_baseline()


@pytest.mark.parametrize("swap", [NOTHING, PLENTY])
def test_a_pool_of_one_and_a_half_requests_does_not_thrash(swap: int) -> None:
    """vllm-project/vllm#25538."""
    rig = rig_of(9, swap=swap, block_size=16)
    got = [rig.submit(make_request(f"r{i}", prompt_of(16, i), greedy(81))) for i in range(4)]
    rig.run()
    assert_solo(*got)
    assert 0 < rig.core.stats.preemptions < 20


@pytest.mark.parametrize("swap", [NOTHING, PLENTY])
def test_a_request_is_preempted_twice(swap: int, logs: list[EventDict]) -> None:
    """By two more urgent ones that come one after the other, and have grown to 10 of 12 blocks when they end."""
    rig = rig_of(12, swap=swap)
    victim = rig.submit(replace(make_request("victim", prompt_of(4), greedy(40)), priority=5))
    for i in range(2):
        rig.step()
        urgent = rig.submit(make_request(f"urgent{i}", prompt_of(1, i), greedy(40)))
        while not urgent.ended or rig.core.load().preempted:
            rig.step()
        assert_solo(urgent)
    rig.run()
    assert preempted(logs) == ["victim", "victim"]
    assert_solo(victim)
    rig.assert_baseline()


@pytest.mark.parametrize("swap", [NOTHING, 30 * POSITION_BYTES, PLENTY])
@pytest.mark.parametrize("num_prompt", [3, 4, 7, 8])
@pytest.mark.parametrize("spare", [0, 1, 3])
def test_choices_are_preempted_one_by_one(spare: int, num_prompt: int, swap: int) -> None:
    sampling = SamplingParams(14, n=5, temperature=1.5, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    request = make_request("a", prompt_of(num_prompt), sampling)
    rig = rig_of(-(-request.num_slots // 4) + spare, swap=swap)
    got, late = rig.submit(request), rig.submit(make_request("late", prompt_of(2), replace(sampling, n=2)))
    rig.run()
    assert rig.core.stats.preemptions > 0
    assert_solo(got, late)
    rig.assert_baseline()


def test_a_handoff_is_preempted_twice_on_decode(logs: list[EventDict]) -> None:
    """sgl-project/sglang#25372, #40730; LMCache/LMCache#1361: prompts from two prefill workers."""
    decode = rig_of(12)
    pairs = [RigPair(rig_of(64), decode) for _ in range(2)]
    victim = replace(make_request("victim", prompt_of(4), greedy(40)), priority=5)
    got = pairs[0].start(victim)
    pairs[0].hand_over(victim.request_id)
    for i in range(2):
        urgent = make_request(f"urgent{i}", prompt_of(1, i), greedy(40))
        transcript = pairs[1].start(urgent)
        pairs[1].hand_over(urgent.request_id)
        while not transcript.ended or decode.core.load().preempted:
            decode.step()
        assert_solo(transcript)
    decode.run()
    assert preempted(logs) == ["victim", "victim"]
    assert_solo(got)
    decode.assert_baseline()


# --- who gives way


def test_the_least_urgent_gives_way(logs: list[EventDict]) -> None:
    rig = rig_of(8)
    priorities = {"late": 0, "urgent": -1, "patient": 7}
    requests = [
        replace(make_request(name, prompt_of(4, priority), greedy(20)), priority=priority)
        for name, priority in priorities.items()
    ]
    got = [rig.submit(request) for request in requests]
    rig.run()
    assert_solo(*got)
    assert preempted(logs)[0] == "patient"
    assert "urgent" not in preempted(logs)
    ends = [entry for entry in logs if entry["event"] == "preempted"]
    assert ends[0]["kind"] == "swapped"
    assert ends[0]["choice"] == 0
    assert 4 < ends[0]["tokens"] < 24


def test_the_earliest_finishes_without_being_preempted(logs: list[EventDict]) -> None:
    rig = rig_of(8)
    got = [rig.submit(make_request(f"r{i}", prompt_of(5, i), greedy(24))) for i in range(6)]
    rig.run()
    assert_solo(*got)
    assert preempted(logs)
    assert "r0" not in preempted(logs)


def test_leases_and_held_prefills_never_give_way(logs: list[EventDict]) -> None:
    """What others write and read stays where it is: the only decoding sequence waits for them instead."""
    rig = rig_of(7)
    decodes = rig.submit(make_request("decodes", prompt_of(4), greedy(16)))
    rig.step()
    leased = rig.submit(make_request("leased", prompt_of(8), greedy(1), work=Work.DECODE))
    rig.submit(make_request("held", prompt_of(8, 1), greedy(9), work=Work.PREFILL))
    rig.run()
    assert preempted(logs) == ["decodes"]
    assert leased.blocks is not None
    assert not decodes.ended
    rig.cancel(RequestId("held"))
    rig.run()
    assert_solo(decodes)
    rig.cancel(RequestId("leased"))
    rig.assert_baseline()


def test_choices_that_wait_give_their_prompt_up_for_whoever_is_more_urgent() -> None:
    """One seat, free; its choices hold 2 of 5 blocks, and the head of the line needs 4: nobody else can run."""
    rig = rig_of(5, seats=1)
    request = make_request("a", prompt_of(8), SamplingParams(3, n=3, temperature=1.5, ignore_eos=True))
    got = rig.submit(request)
    rig.step()
    urgent = rig.submit(replace(make_request("urgent", prompt_of(16, 1), greedy(3)), priority=-1))
    rig.core.abort(RequestId("a"), 0)
    rig.run()
    assert rig.core.stats.preemptions == 2
    assert_solo(urgent)
    for choice in got.all[1:]:
        choice.assert_equals(solo(request, choice.choice))
    rig.assert_baseline()


def test_the_last_to_run_gives_way_to_a_choice_that_can_run_then() -> None:
    """A lease of 2 of 8 blocks stays. "a" grows to 4, finds no fifth, and leaves; the choice needs nobody's command."""
    rig = rig_of(8)
    a = rig.submit(make_request("a", prompt_of(4), greedy(21)))
    rig.submit(make_request("lease", prompt_of(8, 2), greedy(1), work=Work.DECODE))
    rig.step()
    sampling = SamplingParams(16, n=2, temperature=1.5, ignore_eos=True)
    urgent = rig.submit(replace(make_request("urgent", prompt_of(8, 1), sampling), priority=-1))
    rig.step()
    rig.core.abort(RequestId("urgent"), 0)
    rig.step()
    assert (rig.core.load().running, rig.core.load().waiting) == (1, 1)
    rig.run()
    urgent.all[1].assert_equals(solo(urgent.request, 1))
    assert_solo(a)
    rig.cancel(RequestId("lease"))
    rig.assert_baseline()


def test_waiting_choices_keep_a_prompt_that_would_not_become_free() -> None:
    """The seated sibling holds it as well: copying it for each of them would gain nothing."""
    rig = rig_of(8, seats=2)
    sampling = SamplingParams(16, n=4, temperature=1.5, ignore_eos=True)
    got = rig.submit(make_request("a", prompt_of(8), sampling))
    rig.step()
    rig.submit(make_request("lease", prompt_of(12), greedy(1), work=Work.DECODE))
    rig.core.abort(RequestId("a"), 1)
    run_until_preempted(rig)
    assert rig.core.stats.preemptions == 1
    rig.cancel(RequestId("lease"))
    rig.run()
    for choice in (0, 2, 3):
        got.all[choice].assert_equals(solo(got.request, choice))
    rig.assert_baseline()


@pytest.mark.parametrize("sharer", ["urgent", "held"])
def test_waiting_choices_keep_a_prompt_from_which_whoever_is_more_urgent_would_gain_nothing(sharer: str) -> None:
    """It shares those blocks itself, or somebody else does, who keeps them: there is nothing to be had but copies."""
    shared = prompt_of(8)
    prompts = {"held": prompt_of(12, 1), "urgent": prompt_of(20, 2)}
    prompts[sharer] = shared + prompts[sharer][8:]
    rig = rig_of(7 if sharer == "urgent" else 6, seats=1)
    request = make_request("a", shared, SamplingParams(3, n=3, temperature=1.5, ignore_eos=True))
    got = rig.submit(request)
    rig.step()
    for choice in (0, 1):
        rig.core.abort(RequestId("a"), choice)
    held = make_request("held", prompts["held"], greedy(1), work=Work.PREFILL)
    rig.submit(replace(held, priority=-2))
    rig.step()
    urgent = rig.submit(replace(make_request("urgent", prompts["urgent"], greedy(1)), priority=-1))
    assert not rig.step()
    assert rig.core.stats.preemptions == 0
    rig.cancel(RequestId("held"))
    rig.run()
    assert_solo(urgent)
    got.all[2].assert_equals(solo(request, 2))
    rig.assert_baseline()
