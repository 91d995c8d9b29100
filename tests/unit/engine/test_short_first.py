"""Short prompts overtake long ones, within bounds: worked by hand."""

import pytest

from common.engine.objectives import Objectives
from common.engine.pace import Pace
from common.engine.request import Work
from common.engine.step_fit import NUM_TRIAL_STEPS, StepTimeFit
from common.engine.step_times import StepTimes, StepWork
from tests.unit.engine.bench import Bench


def measured(max_contended_step_s: float | None, num_steps: int = NUM_TRIAL_STEPS) -> Pace:
    """Of an engine whose steps take 1 ms and 0.1 ms per prompt token."""
    fit = StepTimeFit(8, 2)
    for _ in range(num_steps):
        fit.observe(StepWork().with_prompt(64, 0), 0.0074)
    fit.times = StepTimes(fixed_s=0.001, prompt_token_s=0.0001)
    return Pace(fit, Objectives(), max_contended_step_s=max_contended_step_s)


def contended(
    max_contended_step_s: float | None, *, num_steps: int = NUM_TRIAL_STEPS, least_chunk: int | None = None
) -> Bench:
    """A budget of 64 tokens, so that 16 of them may overtake others."""
    pace = measured(max_contended_step_s, num_steps)
    return Bench(num_blocks=1000, budget=64, pace=pace, max_mixed_prefill_tokens=least_chunk)


def prefill(bench: Bench, name: str, num_tokens: int) -> None:
    bench.add(name, num_tokens, work=Work.PREFILL)


# --- who overtakes whom


def test_short_prompts_go_before_a_long_one_within_a_quarter_of_the_step() -> None:
    bench = Bench(budget=16)
    bench.add("long", 60, work=Work.PREFILL)
    assert bench.plan() == [("long", 0, 16)]
    for name, num_tokens in [("a", 3), ("b", 2), ("c", 1)]:
        bench.add(name, num_tokens, work=Work.PREFILL)
    assert bench.plan() == [("a", 0, 3), ("c", 0, 1), ("long", 16, 28)]  # "b" would make five of at most four
    assert bench.plan() == [("b", 0, 2), ("long", 28, 42)]
    assert bench.plan() == [("long", 42, 58)]


def test_the_end_of_a_long_prompt_is_short_too() -> None:
    bench = Bench(budget=16)
    bench.add("first", 18, work=Work.PREFILL)
    bench.add("second", 40, work=Work.PREFILL)
    assert bench.plan() == [("first", 0, 16)]
    assert bench.plan() == [("first", 16, 18), ("second", 0, 14)]


def test_a_short_prompt_does_not_overtake_a_more_urgent_one() -> None:
    bench = Bench(budget=16)
    bench.add("urgent", 40, work=Work.PREFILL, priority=-1)
    assert bench.plan() == [("urgent", 0, 16)]
    bench.add("short", 1, work=Work.PREFILL)
    bench.add("as urgent", 2, work=Work.PREFILL, priority=-1)
    assert bench.plan() == [("as urgent", 0, 2), ("urgent", 16, 30)]
    assert bench.plan() == [("urgent", 30, 40), ("short", 0, 1)]


def test_what_overtakes_is_paid_for_by_what_does_not() -> None:
    """Of 64 tokens 16 may overtake; three tokens of the long prompt earn one that may, up to 16."""
    bench = contended(0.0005)  # no step is that short, so it has 16 tokens
    prefill(bench, "long", 300)
    assert bench.plan() == [("long", 0, 64)]
    prefill(bench, "a", 10)
    prefill(bench, "b", 6)
    assert bench.plan() == [("a", 0, 10), ("b", 0, 6)]
    prefill(bench, "c", 6)
    assert bench.plan() == [("long", 64, 80)]  # earns five and a third
    assert bench.plan() == [("long", 80, 96)]
    assert bench.plan() == [("c", 0, 6), ("long", 96, 106)]


def test_what_came_first_overtakes_nobody() -> None:
    """So that it costs nothing of what others have earned: as much may overtake right afterwards."""
    bench = contended(0.0043)
    prefill(bench, "first", 16)
    prefill(bench, "long", 300)
    assert bench.plan() == [("first", 0, 16), ("long", 0, 16)]
    prefill(bench, "late", 16)
    assert bench.plan() == [("late", 0, 16), ("long", 16, 32)]


# --- how long a contended step is


def test_a_step_is_kept_short_while_short_prompts_come() -> None:
    """4.3 ms are 33 tokens, in whole sixteens 32."""
    bench = contended(0.0043)
    prefill(bench, "long", 1400)
    assert bench.plan() == [("long", 0, 64)]
    prefill(bench, "short", 10)
    assert bench.plan() == [("short", 0, 10), ("long", 64, 86)]
    # 16 steps of 64 tokens: others may follow.
    rounds = [bench.plan() for _ in range(32)]
    assert rounds == [[("long", start, start + 32)] for start in range(86, 1110, 32)]
    assert bench.plan() == [("long", 1110, 1174)]


@pytest.mark.parametrize(("least_chunk", "num_tokens"), [(16, 32), (48, 48), (100, 64)])
def test_chunks_between_short_prompts_are_not_tiny(least_chunk: int, num_tokens: int) -> None:
    bench = contended(0.0043, least_chunk=least_chunk)
    prefill(bench, "long", 300)
    bench.plan()
    prefill(bench, "short", 10)
    assert bench.plan() == [("short", 0, 10), ("long", 64, 86)]
    assert bench.plan() == [("long", 86, 86 + num_tokens)]


def test_short_prompts_have_their_step_however_long_it_takes() -> None:
    bench = contended(0.0021)  # 11 tokens, but at least 16
    prefill(bench, "long", 300)
    bench.plan()
    for name in ("a", "b"):
        prefill(bench, name, 8)
    assert bench.plan() == [("a", 0, 8), ("b", 0, 8)]
    assert bench.plan() == [("long", 64, 80)]


def test_a_bound_that_no_step_exceeds_changes_nothing() -> None:
    bench = contended(0.0075)
    prefill(bench, "long", 300)
    bench.plan()
    prefill(bench, "short", 10)
    assert bench.plan() == [("short", 0, 10), ("long", 64, 118)]


@pytest.mark.parametrize(
    ("max_contended_step_s", "num_steps"), [(None, NUM_TRIAL_STEPS), (0.0043, NUM_TRIAL_STEPS - 1)]
)
def test_without_a_bound_or_measurements_steps_are_whole(max_contended_step_s: float | None, num_steps: int) -> None:
    bench = contended(max_contended_step_s, num_steps=num_steps)
    prefill(bench, "long", 300)
    bench.plan()
    prefill(bench, "short", 10)
    assert bench.plan() == [("short", 0, 10), ("long", 64, 118)]
    assert bench.plan() == [("long", 118, 182)]


def test_prompts_that_fit_into_a_step_are_computed_together() -> None:
    """Whoever has many prompts of one step wants them through, and none of them stands in the way for long."""
    bench = contended(0.0043)
    prefill(bench, "medium", 60)
    prefill(bench, "short", 10)
    assert bench.plan() == [("short", 0, 10), ("medium", 0, 54)]


def test_a_long_prompt_is_cut_only_where_another_one_meets_it() -> None:
    bench = contended(0.0043)
    prefill(bench, "short", 10)
    assert bench.plan() == [("short", 0, 10)]
    prefill(bench, "long", 100)
    assert bench.plan() == [("long", 0, 64)]


def test_the_last_chunk_of_a_long_prompt_keeps_no_step_short() -> None:
    bench = contended(0.0043)
    prefill(bench, "first", 74)
    prefill(bench, "second", 300)
    assert bench.plan() == [("first", 0, 64)]
    assert bench.plan() == [("first", 64, 74), ("second", 0, 54)]
    assert bench.plan() == [("second", 54, 118)]


def test_steps_that_are_kept_short_are_foretold() -> None:
    bench = contended(0.0043)
    prefill(bench, "long", 300)
    bench.plan()
    prefill(bench, "short", 10)
    prefill(bench, "next", 7)
    assert bench.plan() == [("short", 0, 10), ("long", 64, 86)]
    # 6 are left and 22 / 3 were earned.
    assert bench.foretold == [(0, 7), (86, 111)]
    assert bench.plan() == [("next", 0, 7), ("long", 86, 111)]
