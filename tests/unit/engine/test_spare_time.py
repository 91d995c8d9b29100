"""What the engine does while nothing is to be computed, and what that must not hold up."""

import threading
from dataclasses import replace

import numpy as np
import pytest

from common.engine.solo import SoloRunner
from common.sampling import SamplingParams
from tests.fakes.fake_runner import FakeRunner, fake_store
from tests.unit.engine.consumer import PROMPT, TIMEOUT_S, Consumer
from tests.unit.engine.rig import EOS, greedy, make_request, solo


class Work:
    """Does `num_things`, and tells of each; waits before one for as long as `gate` is clear."""

    def __init__(self, num_things: int) -> None:
        self.num_left = num_things
        self.num_calls = 0
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.done = threading.Event()
        self.let_go = threading.Event()

    def __call__(self) -> bool:
        self.num_calls += 1
        self.entered.set()
        assert self.gate.wait(TIMEOUT_S)
        if not self.num_left:
            self.done.set()
            return False
        self.num_left -= 1
        return True


def working(work: Work) -> Consumer:
    consumer = Consumer()
    consumer.engine.use_spare_time(work, work.let_go.set)
    consumer.engine.start()
    return consumer


def test_spare_time_is_used_until_nothing_is_left_and_again_after_a_wake() -> None:
    work = Work(5)
    consumer = working(work)
    consumer.engine.wake()
    assert work.done.wait(TIMEOUT_S)
    assert work.num_left == 0
    work.done.clear()
    work.num_left = 2
    consumer.engine.wake()
    assert work.done.wait(TIMEOUT_S)
    assert work.num_left == 0
    consumer.assert_baseline()


def test_a_request_that_comes_meanwhile_waits_for_one_thing_only() -> None:
    work = Work(1000)
    work.gate.clear()
    consumer = working(work)
    consumer.engine.wake()
    assert work.entered.wait(TIMEOUT_S)
    transcript = consumer.submit(make_request("a", PROMPT, greedy(4)))
    num_left_before = work.num_left
    seen = []
    consumer.on_batch = lambda events: seen.append(work.num_left)
    work.gate.set()
    consumer.receive_until_ended(transcript)
    transcript.assert_equals(solo(transcript.request))
    # The thing that was under way, and no other, was done before the first event, and none between the others.
    assert set(seen) == {num_left_before - 1}
    assert work.done.wait(TIMEOUT_S)
    consumer.assert_baseline()


def test_a_frozen_engine_has_no_spare_time() -> None:
    work = Work(1)
    consumer = working(work)
    consumer.engine.freeze().result(TIMEOUT_S)
    assert work.let_go.is_set()
    calls = work.num_calls
    consumer.engine.wake()
    assert consumer.engine.check_invariants() == []  # a barrier: the wake has been read
    assert work.num_calls == calls
    consumer.engine.thaw().result(TIMEOUT_S)
    assert work.done.wait(TIMEOUT_S)
    assert work.num_left == 0
    consumer.assert_baseline()


def test_an_engine_with_endless_spare_work_stops() -> None:
    work = Work(2**60)
    consumer = working(work)
    consumer.engine.wake()
    assert work.entered.wait(TIMEOUT_S)
    consumer.assert_baseline()


@pytest.mark.parametrize("piece", [1, 2, 3, 4, 5, 100])
@pytest.mark.parametrize("scores", [None, 2])
def test_a_solo_run_in_pieces_gives_the_same(piece: int, scores: int | None) -> None:
    store = fake_store(8)
    runner = FakeRunner(store)
    sampling = replace(SamplingParams(max_tokens=4, seed=3, ignore_eos=True, logprobs=1), prompt_logprobs=scores)
    whole = SoloRunner(runner, store, EOS).run(PROMPT, sampling, 1)
    runner.batches.clear()
    steps = SoloRunner(runner, store, EOS).steps(PROMPT, sampling, 1, piece_tokens=piece)
    num_steps = 0
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result = end.value
            break
        num_steps += 1
        assert len(runner.batches) == num_steps
    assert num_steps == -(-len(PROMPT) // piece) + 3
    assert all(len(chunk.token_ids) <= piece for [chunk] in runner.batches)
    assert (result.tokens, result.finish) == (whole.tokens, whole.finish)
    np.testing.assert_array_equal(result.rows_TLK, whole.rows_TLK, strict=True)
    if scores is None:
        assert result.prompt_logprobs is None
    else:
        np.testing.assert_array_equal(result.prompt_logprobs, whole.prompt_logprobs, strict=True)
