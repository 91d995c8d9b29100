"""Freezes and weight updates while sequences have lost their blocks."""

from dataclasses import replace

import pytest

from common.engine.request import RequestId, Work
from common.sampling import SamplingParams
from tests.unit.engine.crowded import (
    NOTHING,
    POSITION_BYTES,
    assert_solo,
    freeze,
    prompt_of,
    rig_of,
    run_until_preempted,
    two_that_do_not_fit,
)
from tests.unit.engine.rig import (
    FakeRig,
    RigPair,
    Transcript,
    greedy,
    limits,
    make_request,
    solo,
    straddling_solo,
)


def change_weights(rig: FakeRig) -> None:
    rig.core.weight_version, rig.runner.weights = "1", 1
    rig.core.open_admission()


def assert_straddles(*transcripts: Transcript) -> None:
    for transcript in transcripts:
        for choice in transcript.all:
            versions = [token.weight_version for token in choice.tokens]
            choice.assert_equals(straddling_solo(choice.request, versions, choice.choice))


def test_a_freeze_waits_for_what_has_to_be_computed_again() -> None:
    """In one step; whoever has the blocks keeps a copy, and goes on later."""
    rig = rig_of(7, swap=NOTHING)
    a, b = two_that_do_not_fit(rig)
    told = len(a.tokens), len(b.tokens)
    waits = rig.submit(make_request("waits", prompt_of(3), greedy(2)))
    assert freeze(rig) == 1
    assert (len(a.tokens), len(b.tokens)) in {told, (told[0], told[1] + 1)}
    assert not waits.tokens
    assert rig.core.load().swap_bytes_used == (6 + len(a.tokens) - 1) * POSITION_BYTES
    change_weights(rig)
    rig.run()
    assert rig.core.stats.preemptions_recomputed == 1
    assert_straddles(a, b, waits)
    assert {token.weight_version for token in b.tokens} == {"", "1"}
    rig.assert_baseline()


def test_a_freeze_takes_no_longer_than_computing_again() -> None:
    """Two requests that have hardly begun, and would need half of the pool each for 60 steps more."""
    rig = rig_of(30, swap=NOTHING)
    a, b = (rig.submit(make_request(name, prompt_of(5, i), greedy(110))) for i, name in enumerate("ab"))
    run_until_preempted(rig)
    known = 5 + len(b.tokens)
    assert known > 50
    assert freeze(rig) <= -(-known // 16)
    change_weights(rig)
    rig.run()
    assert_straddles(a, b)
    rig.assert_baseline()


def test_a_freeze_takes_seats_too() -> None:
    """Two of them: one is the earliest's, the other that of a prompt more urgent than what has lost its KV."""
    rig = rig_of(7, swap=NOTHING, seats=2)
    a, b = two_that_do_not_fit(rig)
    urgent = rig.submit(replace(make_request("urgent", prompt_of(1), greedy(6)), priority=-1))
    rig.step()
    assert (rig.core.load().running, rig.core.load().preempted) == (2, 1)
    assert freeze(rig) == 1
    assert not any(transcript.ended for transcript in (a, b, urgent))
    change_weights(rig)
    rig.run()
    assert_straddles(a, b, urgent)
    rig.assert_baseline()


def test_a_freeze_takes_the_prompt_of_choices_that_wait() -> None:
    """A decoding choice and two that have no seat hold its 3 of 6 blocks; what was preempted needs 4."""
    rig = rig_of(6, swap=NOTHING, seats=1)
    rig.submit(make_request("held", prompt_of(12, 2), greedy(2), work=Work.PREFILL))
    rig.step()
    late = rig.submit(make_request("late", prompt_of(6, 1), greedy(14)))
    rig.run()
    assert rig.core.stats.preemptions_recomputed == 1
    sampling = SamplingParams(6, n=3, temperature=1.5, ignore_eos=True)
    urgent = rig.submit(replace(make_request("urgent", prompt_of(12), sampling), priority=-1))
    rig.cancel(RequestId("held"))
    rig.step()
    assert (rig.core.load().running, rig.core.load().waiting) == (1, 3)
    assert freeze(rig) == 1
    assert rig.core.load().swap_bytes_used == (12 + 12 + 12) * POSITION_BYTES
    change_weights(rig)
    rig.run()
    assert_straddles(late, urgent)
    rig.assert_baseline()


def test_a_freeze_waits_for_a_lease_that_has_the_blocks() -> None:
    rig = rig_of(7, swap=NOTHING)
    a, b = two_that_do_not_fit(rig)
    pair = RigPair(rig_of(16), rig)
    urgent = replace(make_request("urgent", prompt_of(16, 2), greedy(3)), priority=-1)
    rig.cancel(a.request.request_id)
    leased = pair.start(urgent)
    assert leased.blocks
    rig.core.close_admission()
    rig.run()
    assert rig.core.has_open_prompts()
    pair.hand_over(urgent.request_id)
    assert freeze(rig) == 1
    change_weights(rig)
    rig.run()
    assert_straddles(b, leased)
    rig.assert_baseline()


@pytest.mark.parametrize("num_tokens", range(1, 10))
def test_nobody_who_is_computed_again_is_stopped_before_a_freeze(num_tokens: int) -> None:
    """A decoding sequence that is more urgent needs a fifth block after 9 tokens, and gives way itself then."""
    bounds = limits(max_num_batched_tokens=2, swap_space_bytes=NOTHING)
    rig = FakeRig(num_blocks=7, bounds=bounds, prefix_caching=False)
    a, b = two_that_do_not_fit(rig)
    rig.cancel(a.request.request_id)
    urgent = rig.submit(replace(make_request("urgent", prompt_of(8), greedy(20)), priority=-1))
    while len(urgent.tokens) < num_tokens:
        rig.step()
    known, before = 6 + len(b.tokens), rig.core.stats.preemptions
    assert freeze(rig) <= -(-known // 2)
    assert rig.core.stats.preemptions - before <= 1
    change_weights(rig)
    rig.run()
    assert_straddles(b, urgent)
    rig.assert_baseline()


def test_a_freeze_does_not_wait_for_what_is_saved() -> None:
    rig = rig_of(7)
    a, b = two_that_do_not_fit(rig)
    assert freeze(rig) == 0
    rig.core.weight_version, rig.runner.weights = "1", 1
    rig.core.open_admission()
    rig.run()
    for got in (a, b):
        got.assert_equals(straddling_solo(got.request, [token.weight_version for token in got.tokens]))


def test_kv_of_earlier_weights_is_saved_beyond_the_bound() -> None:
    rig = rig_of(7, swap=NOTHING)
    requests = [make_request(name, prompt_of(6, i), greedy(14)) for i, name in enumerate("ab")]
    a, b = (rig.submit(request) for request in requests)
    rig.step()
    assert freeze(rig) == 0
    rig.core.weight_version, rig.runner.weights = "1", 1
    rig.core.open_admission()
    run_until_preempted(rig)
    assert rig.core.load().swap_bytes_used > rig.core.load().swap_bytes_total == NOTHING
    rig.run()
    stats = rig.core.stats
    assert (stats.preemptions_swapped, stats.preemptions_beyond_bound, stats.preemptions_recomputed) == (1, 1, 0)
    for got in (a, b):
        got.assert_equals(straddling_solo(got.request, [token.weight_version for token in got.tokens]))


@pytest.mark.parametrize("when", ["before", "after"])
def test_forgetting_prefixes_changes_no_weights(when: str) -> None:
    """It may still be computed again, but finds nothing in the cache."""
    rig = rig_of(7, swap=NOTHING)
    a = rig.submit(make_request("a", prompt_of(6, 0), greedy(14)))
    b = rig.submit(make_request("b", prompt_of(6, 1), greedy(14)))
    rig.step()
    if when == "before":
        rig.core.reset_prefix_cache()
    run_until_preempted(rig)
    if when == "after":
        rig.core.reset_prefix_cache()
    known = len(b.request.prompt) + len(b.tokens)
    rig.run()
    assert rig.core.stats.preemptions_recomputed == 1
    assert rig.core.stats.recomputed_tokens == known
    assert_solo(a, b)


def test_weights_do_not_change_under_what_has_to_be_computed_again() -> None:
    rig = rig_of(7, swap=NOTHING)
    two_that_do_not_fit(rig)
    with pytest.raises(AssertionError, match="other weights"):
        rig.core.weight_version = "1"


def test_a_prompt_of_other_weights_is_never_computed_again() -> None:
    """The prefill worker had not got the new ones yet: no copy would mean KV of the weights in use here."""
    rig = rig_of(7, swap=NOTHING)
    change_weights(rig)
    a = rig.submit(make_request("a", prompt_of(6, 0), greedy(14)))
    rig.step()
    pair = RigPair(rig_of(16), rig)
    b = pair.start(make_request("b", prompt_of(6, 1), greedy(14)))
    pair.hand_over(b.request.request_id)
    run_until_preempted(rig)
    assert (rig.core.stats.preemptions_swapped, rig.core.stats.preemptions_recomputed) == (1, 0)
    rig.run()
    a.assert_equals(solo(a.request, weights=1, version="1"))
    assert [token.weight_version for token in b.tokens] == ["", *["1"] * 13]
    assert_straddles(b)
    rig.assert_baseline()
