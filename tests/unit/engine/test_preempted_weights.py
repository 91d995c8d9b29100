"""Freezes and weight updates while sequences have lost their blocks."""

import pytest

from tests.unit.engine.crowded import (
    NOTHING,
    assert_solo,
    freeze,
    prompt_of,
    rig_of,
    run_until_preempted,
    two_that_do_not_fit,
)
from tests.unit.engine.rig import (
    greedy,
    make_request,
    straddling_solo,
)


def test_a_freeze_waits_for_what_has_to_be_computed_again() -> None:
    rig = rig_of(7, swap=NOTHING)
    a, b = two_that_do_not_fit(rig)
    told = len(b.tokens)
    waits = rig.submit(make_request("waits", prompt_of(3), greedy(2)))
    assert freeze(rig) > 0
    assert a.ended  # it had the blocks
    assert len(b.tokens) == told + 1
    assert not waits.tokens
    rig.core.weight_version, rig.runner.weights = "1", 1
    rig.core.open_admission()
    rig.run()
    assert rig.core.stats.preemptions_recomputed == 1
    b.assert_equals(straddling_solo(b.request, [token.weight_version for token in b.tokens]))
    assert {token.weight_version for token in b.tokens} == {"", "1"}


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
    assert rig.core.load().swap_bytes_used > 0
    rig.run()
    assert (rig.core.stats.preemptions_swapped, rig.core.stats.preemptions_recomputed) == (1, 0)
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
