"""Hypothesis drives two engines on a real model with latent attention: what fails is shrunk to the fewest steps."""

import tempfile
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from common.engine.request import EngineRequest, RequestId, Work
from common.sampling import SamplingParams
from tests.stress.asks import Ask
from tests.stress.model import EngineShape, StressModel
from tests.stress.oracle import Oracle
from tests.stress.pair import EnginePair

pytestmark = pytest.mark.usefixtures("quiet")

FAMILY = "deepseek_v3"

#: Most prompts are one of its beginnings, so that blocks are found, shared, evicted and computed again.
SHARED = list(range(40, 60))
PROMPTS = st.builds(
    lambda num_shared, own: (SHARED[:num_shared] + own)[:20],
    st.integers(0, len(SHARED)),
    st.lists(st.integers(3, 9), min_size=1, max_size=6),
)
SAMPLING = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 14),
    temperature=st.sampled_from([0.0, 1.0]),
    top_k=st.sampled_from([0, 8]),
    seed=st.integers(0, 2),
    ignore_eos=st.booleans(),
    logprobs=st.sampled_from([None, 2]),
    n=st.integers(1, 3),
    prompt_logprobs=st.sampled_from([None, None, 1]),
    repetition_penalty=st.sampled_from([1.0, 1.2]),
)


@cache
def _model() -> StressModel:
    """Made once per process."""
    with tempfile.TemporaryDirectory() as directory:
        return StressModel(FAMILY, torch.bfloat16, Path(directory))


SHAPES = st.builds(
    lambda num_blocks, budget, seats, swap_positions, prefix_caching: EngineShape(
        num_blocks, budget, seats, swap_positions * _model().position_bytes(), prefix_caching
    ),
    num_blocks=st.integers(9, 16),  # of 4 slots: the largest request needs 9
    budget=st.integers(2, 24),
    seats=st.integers(1, 6),
    swap_positions=st.sampled_from([0, 30, 10**6]),
    prefix_caching=st.booleans(),
)


class PairMachine(RuleBasedStateMachine):
    """Requests of every kind of work on a prefill and a decode engine, and everything that may happen to them."""

    @initialize(prefill=SHAPES, decode=SHAPES)
    def build(self, prefill: EngineShape, decode: EngineShape) -> None:
        self.pair = EnginePair(_model(), prefill, decode, block_size=4)
        self.count = 0

    @rule(
        prompt=PROMPTS,
        sampling=SAMPLING,
        start=st.sampled_from([None, 0, 1]),
        work=st.sampled_from([Work.WHOLE, Work.DECODE]),
        priority=st.integers(-1, 1),
        salt=st.sampled_from(["", "", "salt"]),
        local=st.sampled_from([0, 3, 20]),
    )
    def submit(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        start: int | None,
        work: Work,
        priority: int,
        salt: str,
        local: int,
    ) -> None:
        self.count += 1
        name = RequestId(f"r{self.count}")
        request = EngineRequest(
            name, prompt, sampling, start, work, priority, cache_salt=salt, local_prefill_max_tokens=local
        )
        self.pair.submit(request, Ask(prompt, sampling, None), self.pair.decode)

    @rule(times=st.integers(1, 4))
    def step_decode(self, times: int) -> None:
        for _ in range(times):
            self.pair.step(self.pair.decode)

    @rule(times=st.integers(1, 4))
    def step_prefill(self, times: int) -> None:
        for _ in range(times):
            self.pair.step(self.pair.prefill)

    @precondition(lambda self: self.pair.handoffs)
    @rule(data=st.data(), most=st.integers(1, 20))
    def carry(self, data: st.DataObject, most: int) -> None:
        self.pair.carry(data.draw(st.sampled_from(sorted(self.pair.handoffs))), most)

    @precondition(lambda self: self.pair.live())
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.pair.cancel(data.draw(st.sampled_from(self.pair.live())))

    @precondition(lambda self: self.pair.live())
    @rule(data=st.data(), choice=st.sampled_from([None, 0, 1]))
    def abort(self, data: st.DataObject, choice: int | None) -> None:
        self.pair.abort(data.draw(st.sampled_from(self.pair.live())), choice)

    @rule(decode=st.booleans())
    def forget_prefixes(self, decode: bool) -> None:
        self.pair.forget_prefixes(self.pair.decode if decode else self.pair.prefill)

    @precondition(lambda self: not self.pair.is_updating)
    @rule()
    def begin_update(self) -> None:
        self.pair.begin_update()

    @rule()
    def try_update(self) -> None:
        self.pair.try_update()

    def teardown(self) -> None:
        if hasattr(self, "pair"):
            self.pair.run()
            self.pair.check_everything(Oracle(_model()))


def _run(max_examples: int) -> None:
    run_state_machine_as_test(
        PairMachine,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )


def test_a_few_random_histories_are_exact() -> None:
    _run(6)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_many_random_histories_are_exact() -> None:
    _run(100)
