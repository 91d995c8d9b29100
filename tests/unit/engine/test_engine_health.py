"""An engine that hangs is told from one that has much to do."""

import threading
import time
from dataclasses import dataclass
from itertools import pairwise

from common.worker.engine_health import EngineHealth
from tests.unit.engine.consumer import PROMPT, TIMEOUT_S, Consumer
from tests.unit.engine.rig import greedy, make_request


@dataclass
class Clock:
    """Real time, and as much more as a test wants to have passed."""

    ahead_s: float = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


def test_a_step_that_does_not_end_is_a_reason_to_complain_until_it_does(consumer: Consumer) -> None:
    """vllm-project/vllm#39863, #36451: the process answers, its engine thread stands still."""
    clock = Clock()
    health = EngineHealth(consumer.engine, step_timeout_s=8, clock=clock)
    consumer.runner.gate.clear()
    transcript = consumer.submit(make_request("a", PROMPT, greedy(3)))
    assert consumer.runner.entered.wait(TIMEOUT_S)
    assert health.complaint() is None, "a step of seconds is no reason"
    clock.ahead_s = 9
    complaint = health.complaint()
    assert complaint is not None
    assert "--step-timeout-s (8)" in complaint
    consumer.runner.gate.set()
    consumer.receive_until_ended(transcript)
    assert consumer.engine.check_invariants() == []  # a barrier: the last step has ended
    assert health.complaint() is None


def test_work_in_spare_time_that_does_not_end_is_a_reason_too() -> None:
    """A request that comes meanwhile waits for its end."""
    consumer, clock, gate, entered = Consumer(), Clock(), threading.Event(), threading.Event()

    def work() -> bool:
        entered.set()
        assert gate.wait(TIMEOUT_S)
        return False

    consumer.engine.use_spare_time(work, lambda: None)
    consumer.engine.start()
    health = EngineHealth(consumer.engine, step_timeout_s=8, clock=clock)
    consumer.engine.wake()
    assert entered.wait(TIMEOUT_S)
    transcript = consumer.submit(make_request("a", PROMPT, greedy(3)))
    assert health.complaint() is None
    clock.ahead_s = 9
    complaint = health.complaint()
    gate.set()
    assert complaint is not None
    consumer.receive_until_ended(transcript)
    consumer.assert_baseline()


def test_a_step_whose_events_are_never_told_is_a_reason_to_complain(consumer: Consumer) -> None:
    """The thread may stand still anywhere: the step itself has ended here."""
    clock, telling, go_on = Clock(), threading.Event(), threading.Event()
    health = EngineHealth(consumer.engine, step_timeout_s=8, clock=clock)

    def hold(_: object) -> None:
        telling.set()
        assert go_on.wait(TIMEOUT_S)

    consumer.on_batch = hold
    transcript = consumer.submit(make_request("a", PROMPT, greedy(3)))
    assert telling.wait(TIMEOUT_S)
    assert health.complaint() is None
    clock.ahead_s = 9
    assert health.complaint() is not None
    go_on.set()
    consumer.receive_until_ended(transcript)
    assert consumer.engine.check_invariants() == []  # a barrier
    assert health.complaint() is None


def test_a_long_prompt_is_no_reason_to_complain(consumer: Consumer) -> None:
    """Its prefill takes longer than any of its steps may."""
    step_s, step_timeout_s, num_steps = 0.2, 2.0, 15

    begins: list[float] = []

    def takes_a_while(_: object) -> bool:
        begins.append(time.monotonic())
        time.sleep(step_s)  # the work itself
        return False

    consumer.runner.fails_on = takes_a_while
    health = EngineHealth(consumer.engine, step_timeout_s)
    transcript = consumer.submit(make_request("a", PROMPT[:4] * num_steps, greedy(1)))
    complaints = []
    while not transcript.ended:
        while consumer.batches.empty():
            complaints.append(health.complaint())
            time.sleep(step_s / 4)  # a poll: health has no event
        consumer.receive()
    begins.append(time.monotonic())
    assert begins[-1] - begins[0] > step_timeout_s
    # On a busy machine one step alone may take as long as none may, and that is a reason.
    longest_s = max(end - begin for begin, end in pairwise(begins))
    assert set(complaints) == {None} or longest_s > step_timeout_s


def test_an_idle_engine_is_healthy_for_ever(consumer: Consumer) -> None:
    assert consumer.engine.check_invariants() == []
    assert EngineHealth(consumer.engine, step_timeout_s=8, clock=Clock(1e6)).complaint() is None


def test_a_frozen_engine_is_healthy_although_requests_wait(consumer: Consumer) -> None:
    """Paused, that is, as it was asked to be."""
    consumer.engine.freeze().result(TIMEOUT_S)
    consumer.submit(make_request("a", PROMPT, greedy(3)))
    assert consumer.engine.check_invariants() == []
    assert EngineHealth(consumer.engine, step_timeout_s=8, clock=Clock(1e6)).complaint() is None


def test_an_engine_that_has_ended_is_not_healthy(consumer: Consumer) -> None:
    consumer.engine.stop()
    complaint = EngineHealth(consumer.engine, step_timeout_s=8).complaint()
    assert complaint is not None
    assert "restart this worker" in complaint
