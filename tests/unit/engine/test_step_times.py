"""Step times: predictions worked by hand, and a fit that finds what a machine really takes."""

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.engine.step_fit import NUM_TRIAL_STEPS, StepTimeFit
from common.engine.step_times import StepTimes, StepWork, num_pairs

#: 128 experts of which a token takes 8; what a 2-core machine may take.
MACHINE = StepTimes(0.002, 0.004, 0.00006, 2e-8, 0.00015, 1e-7, unread=1 - 8 / 128)

Cost = Callable[[StepWork], float]


def test_a_prediction_by_hand() -> None:
    times = StepTimes(1.0, 0.0, 0.1, 0.01, 0.2, 0.02)
    # A chunk of positions 2, 3 and 4 attends to 3 + 4 + 5 = 12 keys; two decodes to 5 + 7.
    work = StepWork(0, 0.0, 2, 12).with_prompt(3, 2)
    assert times.predict(work) == pytest.approx(1 + 3 * 0.1 + 12 * 0.01 + 2 * 0.2 + 12 * 0.02)


@pytest.mark.parametrize(("num_tokens", "share"), [(1, 0.25), (2, 0.4375), (100, 1.0)])
def test_the_experts_that_a_step_reads(num_tokens: int, share: float) -> None:
    """2 of 8: a token reads a quarter, a second one a quarter of the rest, and many read all."""
    times = StepTimes(experts_s=1.0, unread=0.75)
    assert times.predict(StepWork(decode_tokens=num_tokens)) == pytest.approx(share)
    assert times.predict(StepWork(prompt_tokens=num_tokens)) == pytest.approx(share)


@given(st.integers(0, 100), st.integers(0, 100))
def test_pairs_are_those_of_a_causal_mask(start: int, num_tokens: int) -> None:
    assert num_pairs(start, start + num_tokens) == sum(position + 1 for position in range(start, start + num_tokens))


class Steps:
    """Random steps of a machine, and a fit that is told of them."""

    def __init__(self, cost: Cost, seed: int = 1) -> None:
        self.fit = StepTimeFit(128, 8)
        self.cost = cost
        self.random = random.Random(seed)

    def decode(self) -> StepWork:
        contexts = [self.random.randint(50, 1500) for _ in range(self.random.randint(1, 32))]
        return StepWork(0, 0.0, len(contexts), sum(contexts))

    def prompt(self) -> StepWork:
        beside = self.decode() if self.random.random() < 0.5 else StepWork()
        return beside.with_prompt(self.random.randint(1, 512), self.random.randint(0, 1500))

    def observe(self, num: int, *, share_of_prompts: float = 0.1) -> None:
        for _ in range(num):
            work = self.prompt() if self.random.random() < share_of_prompts else self.decode()
            self.fit.observe(work, self.cost(work))

    def error(self, draw: Callable[[], StepWork], cost: Cost | None = None) -> float:
        """Mean relative error of the predictions for steps that it has not seen."""
        truth = cost or self.cost
        works = [draw() for _ in range(200)]
        return sum(abs(self.fit.times.predict(work) / truth(work) - 1) for work in works) / len(works)


def test_a_few_hundred_steps_tell_what_steps_take() -> None:
    steps = Steps(MACHINE.predict)
    steps.observe(300)
    assert steps.error(steps.decode) < 0.03
    assert steps.error(steps.prompt) < 0.05


def test_noise_and_standstills_hardly_matter() -> None:
    """Every step 5 % up or down, one in a hundred fifty times as long."""
    noise = random.Random(2)
    steps = Steps(lambda work: MACHINE.predict(work) * noise.gauss(1, 0.05) * (50 if noise.random() < 0.01 else 1))
    steps.observe(3000)
    assert steps.error(steps.decode, MACHINE.predict) < 0.10
    assert steps.error(steps.prompt, MACHINE.predict) < 0.15


def test_one_standstill_changes_nothing_to_speak_of() -> None:
    steps = Steps(MACHINE.predict)
    steps.observe(300)
    work = steps.decode()
    before = steps.fit.times.predict(work)
    steps.fit.observe(work, 10.0)
    assert steps.fit.times.predict(work) == pytest.approx(before, rel=0.01)


def test_what_prompts_take_is_remembered_while_there_are_none() -> None:
    steps = Steps(MACHINE.predict)
    steps.observe(500)
    steps.observe(5000, share_of_prompts=0)
    assert steps.error(steps.prompt) < 0.10


def test_a_machine_that_becomes_slower_is_followed() -> None:
    steps = Steps(MACHINE.predict)
    steps.observe(1000)
    steps.cost = lambda work: 2 * MACHINE.predict(work)
    steps.observe(2000, share_of_prompts=0.3)
    assert steps.error(steps.decode) < 0.06
    assert steps.error(steps.prompt) < 0.06


def test_an_unvaried_load_is_foretold_from_its_first_steps() -> None:
    """Fifty equal steps: many coefficients explain them, and each of those foretells the next one."""
    fit, work = StepTimeFit(128, 8), StepWork(0, 0.0, 4, 400)
    for _ in range(50):
        fit.observe(work, 0.010)
    assert fit.times.predict(work) == pytest.approx(0.010)


@given(
    st.lists(
        st.tuples(
            st.builds(StepWork, st.integers(0, 600), st.floats(0, 1e6), st.integers(0, 64), st.floats(0, 1e5)),
            st.floats(1e-5, 100),
        ),
        max_size=60,
    )
)
def test_no_coefficient_is_ever_negative(observed: list[tuple[StepWork, float]]) -> None:
    """Whatever a machine does: a step that computes more is never foretold to take less."""
    fit = StepTimeFit(8, 2)
    for work, seconds in observed:
        fit.observe(work, seconds)
    assert min(fit.times) >= 0
    assert max(fit.times) < float("inf")


def test_what_is_known_and_how_well() -> None:
    fit, decode, prompt = StepTimeFit(8, 2), StepWork(0, 0.0, 1, 10), StepWork().with_prompt(7, 0)
    for _ in range(NUM_TRIAL_STEPS):
        assert not fit.knows_decodes
        fit.observe(decode, 0.010)
    assert (fit.knows_decodes, fit.knows_prompts, fit.largest_prompt_step) == (True, False, 0)
    assert (fit.measured_s, fit.predicted_s, fit.error) == (0, 0, 0)
    fit.observe(decode, 0.020)
    assert fit.measured_s == 0.020
    assert fit.predicted_s == pytest.approx(0.010)
    assert fit.error == pytest.approx(0.5 * 0.01)  # a weight of one in a hundred
    for _ in range(NUM_TRIAL_STEPS):
        fit.observe(prompt, 0.030)
    assert (fit.knows_prompts, fit.largest_prompt_step) == (True, 7)
    assert (fit.num_decode_steps, fit.num_prompt_steps) == (NUM_TRIAL_STEPS + 1, NUM_TRIAL_STEPS)
