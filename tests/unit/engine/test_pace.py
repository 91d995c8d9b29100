"""Bounds from predictions: worked by hand, and held to their word for any coefficients."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.engine.objectives import Objectives
from common.engine.pace import FLOOR_TOKENS, TRIAL_STEPS, Pace, Remainder
from common.engine.step_fit import NUM_TRIAL_STEPS, StepTimeFit
from common.engine.step_times import StepTimes, StepWork

#: 10 ms per step, 1 ms per decoding sequence, 0.1 ms per prompt token.
PLAIN = StepTimes(fixed_s=0.010, prompt_token_s=0.0001, decode_token_s=0.001)


def pace(itl_s: float | None, times: StepTimes = PLAIN, *, largest: int = 1000, decodes: int = 100) -> Pace:
    """One that has measured `times`, on steps of up to `largest` prompt tokens."""
    fit = StepTimeFit(8, 2)
    for _ in range(decodes):
        fit.observe(StepWork(0, 0.0, 1, 10), 0.011)
    fit.times, fit.largest_prompt_step = times, largest
    return Pace(fit, Objectives(itl_s=itl_s))


def decodes(num: int, context: int = 10) -> StepWork:
    return StepWork(0, 0.0, num, num * context)


@pytest.mark.parametrize(
    ("itl_s", "tokens"),
    [
        # 20 ms for everything else: 30 ms are left for 300 tokens, in whole sixteens 288.
        (0.050, 288),
        (0.0216, 16),
        # Nothing is left, or less than nothing: prompts go on all the same.
        (0.020, FLOOR_TOKENS),
        (0.001, FLOOR_TOKENS),
        # There is room for more than the setting allows.
        (0.200, 502),
    ],
)
def test_prompt_tokens_beside_ten_decodes(itl_s: float, tokens: int) -> None:
    assert pace(itl_s).prompt_budget(decodes(10), [(0, 2000)], 502) == tokens


def test_a_short_prompt_leaves_room_for_the_next_one() -> None:
    """Pairs alone cost: 10 ms are 1000 of them. 40 tokens have 820; of the next prompt, from 0 on, 16 have 136."""
    times = StepTimes(prompt_pair_s=0.00001)
    assert pace(0.010, times).prompt_budget(decodes(1), [(0, 40), (0, 100)], 500) == 48
    # Further back in a context each token has many more: 16 from 50 on have 936, 32 have 2128.
    assert pace(0.010, times).prompt_budget(decodes(1), [(50, 150)], 500) == 16


@pytest.mark.parametrize(
    ("mixed", "num", "budget", "tokens"),
    [(256, 1, 512, 256), (256, 0, 512, 512), (256, 300, 212, 212), (None, 1, 512, 512), (8, 10, 16, 8)],
)
def test_without_an_objective_a_number_bounds_prompts_beside_decodes(
    mixed: int | None, num: int, budget: int, tokens: int
) -> None:
    """Nobody waits for a step that only computes prompts: there it does not count."""
    bounded = Pace(StepTimeFit(8, 2), Objectives(), mixed)
    assert bounded.prompt_budget(decodes(num), [(0, 2000)], budget) == tokens


def test_an_objective_counts_instead_of_the_number() -> None:
    fit = pace(0.050).fit
    assert Pace(fit, Objectives(itl_s=0.050), 32).prompt_budget(decodes(10), [(0, 2000)], 502) == 288


@pytest.mark.parametrize(
    ("num", "max_contended_step_s", "tokens"),
    [
        # 10 ms for each step and 1 ms per sequence: 30 ms and 20 ms are left for 300 and for 200 tokens.
        (0, 0.0401, 288),
        (10, 0.0401, 192),
        (10, 0.001, FLOOR_TOKENS),
        (0, 1.0, 512),
        (0, None, 512),
    ],
)
def test_tokens_of_a_step_for_which_short_prompts_wait(
    num: int, max_contended_step_s: float | None, tokens: int
) -> None:
    fit = StepTimeFit(8, 2)
    for _ in range(NUM_TRIAL_STEPS):
        fit.observe(StepWork().with_prompt(512, 0), 0.0612)
    fit.times = PLAIN
    bounded = Pace(fit, Objectives(), None, max_contended_step_s)
    assert bounded.contended_budget(decodes(num), [(0, 2000)], 512) == tokens


@pytest.mark.parametrize(("itl_s", "num"), [(None, 10), (0.001, 0)])
def test_without_an_objective_or_without_decodes_all_of_the_budget_is_for_prompts(
    itl_s: float | None, num: int
) -> None:
    assert pace(itl_s).prompt_budget(decodes(num), [(0, 2000)], 501) == 501


def test_chunks_grow_twofold_beyond_what_was_measured() -> None:
    """On a worker that has only decoded, what prompts cost is not known."""
    assert pace(10.0, largest=0).prompt_budget(decodes(1), [(0, 2000)], 500) == FLOOR_TOKENS
    assert pace(10.0, largest=40).prompt_budget(decodes(1), [(0, 2000)], 500) == 80
    assert pace(10.0, largest=250).prompt_budget(decodes(1), [(0, 2000)], 500) == 500


COSTS = st.floats(0, 0.01)
PROMPTS = st.lists(st.tuples(st.integers(0, 500), st.integers(1, 500)).map(lambda p: (p[0], p[0] + p[1])), min_size=1)


@given(
    times=st.builds(StepTimes, COSTS, COSTS, COSTS, COSTS, COSTS, COSTS, unread=st.floats(0, 1)),
    itl_s=st.floats(0.0001, 10),
    num=st.integers(1, 64),
    prompts=PROMPTS,
    budget=st.integers(1, 600),
    largest=st.integers(0, 600),
)
def test_a_step_is_foretold_to_be_in_time_unless_it_has_the_floor_only(
    times: StepTimes, itl_s: float, num: int, prompts: list[Remainder], budget: int, largest: int
) -> None:
    paced = pace(itl_s, times, largest=largest, decodes=0)
    allowed = paced.prompt_budget(decodes(num), prompts, budget)
    assert min(budget, FLOOR_TOKENS) <= allowed <= budget
    if allowed > FLOOR_TOKENS:
        work, left = decodes(num), allowed
        for start, end in prompts:
            part = min(left, end - start)
            work, left = work.with_prompt(part, start), left - part
        assert times.predict(work) <= itl_s


def test_one_more_may_decode_as_long_as_all_are_in_time() -> None:
    """10 ms + 1 ms for each: 20 of them take 30 ms."""
    assert pace(0.030).has_room(decodes(19), 10)
    assert not pace(0.0299).has_room(decodes(19), 10)
    # 19 contexts of 10 and one of 100 are 290 keys of 0.1 ms.
    longer = PLAIN._replace(decode_pair_s=0.0001)
    assert pace(0.0591, longer).has_room(decodes(19), 100)
    assert not pace(0.0589, longer).has_room(decodes(19), 100)


def test_without_an_objective_or_a_measure_there_is_always_room() -> None:
    assert pace(None).has_room(decodes(1000), 10)
    assert pace(0.001, decodes=NUM_TRIAL_STEPS - 1).has_room(decodes(1000), 10)
    assert not pace(0.001, decodes=NUM_TRIAL_STEPS).has_room(decodes(1000), 10)


def test_one_more_is_tried_where_no_larger_batch_was_measured_for_long() -> None:
    """One takes 11 ms, two are foretold to take 12 ms."""
    assert not pace(0.0115, decodes=TRIAL_STEPS - 1).has_room(decodes(1), 10)
    paced = pace(0.0115, decodes=TRIAL_STEPS)
    assert paced.has_room(decodes(1), 10)
    assert not paced.has_room(decodes(2), 10), "two are late already"
    assert not pace(0.0105, decodes=TRIAL_STEPS).has_room(decodes(1), 10), "one is late already"
    # Beside a part of a prompt it is measured as well.
    paced.fit.observe(StepWork(16, 136.0, 3, 30), 0.0146)
    paced.fit.times = PLAIN
    assert not paced.has_room(decodes(1), 10)


@pytest.mark.parametrize("second_s", [0.002, 0.080])
def test_a_batch_that_was_too_slow_once_is_measured_again(second_s: float) -> None:
    """One sequence takes 30 ms, and 50 ms are in time. While the machine was busy a second one cost 80 ms.

    Now it costs `second_s`. Whoever is let in decodes for 100 steps.
    """
    paced = Pace(StepTimeFit(8, 2), Objectives(itl_s=0.050))
    for num in [1, 2] * 200:
        paced.fit.observe(decodes(num), 0.030 + 0.080 * (num - 1))
    second_until, sizes = 0, list[int]()
    for step in range(3 * TRIAL_STEPS):
        if step >= second_until and paced.has_room(decodes(1), 10):
            second_until = step + 100
        num = 2 if step < second_until else 1
        sizes.append(num)
        paced.fit.observe(decodes(num), 0.030 + second_s * (num - 1))
    assert sizes[: TRIAL_STEPS - 1] == [1] * (TRIAL_STEPS - 1)
    if second_s < 0.020:
        assert sizes[TRIAL_STEPS:] == [2] * (2 * TRIAL_STEPS)
    else:
        assert sizes.count(2) == 200


def test_seconds_per_prompt_token() -> None:
    """Beside 2 decodes 98 of 100 tokens: 10 + 2 + 9.8 ms. With an objective of 20.1 ms 80 fit."""
    fit = StepTimeFit(8, 2)
    assert Pace(fit, Objectives()).prompt_token_s(decodes(2), 100) is None
    for _ in range(NUM_TRIAL_STEPS):
        fit.observe(StepWork().with_prompt(100, 0), 0.020)
    fit.times = PLAIN
    assert Pace(fit, Objectives()).prompt_token_s(decodes(2), 100) == pytest.approx(0.0218 / 98)
    assert Pace(fit, Objectives(itl_s=0.0201)).prompt_token_s(decodes(2), 100) == pytest.approx(0.020 / 80)
