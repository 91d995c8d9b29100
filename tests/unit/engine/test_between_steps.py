"""What other threads have the engine do between two steps: freeze, go on, and whatever they like."""

import threading
from concurrent.futures import Future
from itertools import count

import pytest

from common.engine.request import EngineEvent, RequestId, Work
from common.errors import (
    ConflictError,
    UnavailableError,
)
from common.sampling import Finish, FinishReason
from tests.unit.engine.consumer import PROMPT, TIMEOUT_S, Consumer
from tests.unit.engine.rig import Transcript, greedy, make_request, solo


def freeze_in_mid_decode(consumer: Consumer) -> Transcript:
    """A request of 20 tokens in an engine that freezes after its first 5."""
    batches = count(1)
    # The prompt takes two steps, the second of which brings the first token.
    consumer.on_batch = lambda _: consumer.engine.freeze() if next(batches) == 6 else None
    transcript = consumer.submit(make_request("a", PROMPT, greedy(20)))
    while len(transcript.tokens) < 5:
        consumer.receive()
    assert consumer.engine.check_invariants() == []
    assert consumer.engine.frozen
    return transcript


def test_frozen_sequences_go_on_with_the_kv_they_have(consumer: Consumer) -> None:
    """No step runs while frozen; afterwards the rest of the tokens equals a run without a break."""
    transcript = freeze_in_mid_decode(consumer)
    steps = consumer.engine.stats.steps
    assert len(transcript.tokens) == 5
    consumer.submit(make_request("b", PROMPT, greedy(3)))
    for _ in range(2):  # a barrier each: the loop has been through a round with "b" waiting
        assert consumer.engine.check_invariants() == []
    assert consumer.engine.stats.steps == steps
    consumer.engine.thaw().result(TIMEOUT_S)
    consumer.receive_until_ended(*consumer.transcripts.values())
    for each in consumer.transcripts.values():
        each.assert_equals(solo(each.request))
    consumer.assert_baseline()


def test_a_freeze_waits_until_nothing_has_to_be_computed_again() -> None:
    """Two requests of 5 blocks in a pool of 7, and no memory for what is preempted."""
    consumer = Consumer(num_blocks=7, swap_space_bytes=0)
    engine = consumer.engine
    freezes: list[Future[None]] = []
    when_frozen: list[int] = []

    def freeze_at_the_first_preemption(_: list[EngineEvent]) -> None:
        if engine.stats.preemptions and not freezes:
            freezes.append(engine.freeze())
            freezes[0].add_done_callback(lambda _: when_frozen.append(engine.stats.preemptions_swapped))

    consumer.on_batch = freeze_at_the_first_preemption
    requests = [consumer.submit(make_request(name, PROMPT[::step], greedy(16))) for name, step in (("a", 1), ("b", -1))]
    engine.start()
    while not freezes:
        consumer.receive()
    freezes[0].result(TIMEOUT_S)
    assert engine.stats.preemptions_recomputed == 1
    assert when_frozen == [1]  # the one that had the blocks
    assert not any(transcript.ended for transcript in requests)
    engine.thaw().result(TIMEOUT_S)
    consumer.receive_until_ended(*requests)
    for transcript in requests:
        transcript.assert_equals(solo(transcript.request))
    consumer.assert_baseline()


def test_a_freeze_that_is_given_up_fails_and_one_that_is_done_stays(consumer: Consumer) -> None:
    """A handoff that never comes keeps the engine from standing still; once it is over, nothing does."""
    engine = consumer.engine
    consumer.submit(make_request("lease", PROMPT, greedy(3), work=Work.DECODE))
    freeze = engine.freeze()
    engine.give_up_freezes().result(TIMEOUT_S)
    with pytest.raises(ConflictError):
        freeze.result(TIMEOUT_S)
    other = consumer.submit(make_request("a", PROMPT, greedy(3)))
    consumer.receive_until_ended(other)  # admission is open again
    other.assert_equals(solo(other.request))
    engine.cancel(RequestId("lease"))
    engine.freeze().result(TIMEOUT_S)
    engine.give_up_freezes().result(TIMEOUT_S)
    assert engine.frozen
    engine.thaw().result(TIMEOUT_S)
    consumer.assert_baseline()


def test_a_frozen_sequence_can_be_aborted(consumer: Consumer) -> None:
    transcript = freeze_in_mid_decode(consumer)
    consumer.engine.abort(RequestId("a"))
    consumer.receive_until_ended(transcript)
    assert transcript.finish == Finish(FinishReason.ABORT)
    assert len(transcript.tokens) == 5
    consumer.assert_baseline()


def test_a_visit_runs_between_steps_and_returns_or_raises_to_its_caller(consumer: Consumer) -> None:
    consumer.runner.gate.clear()
    consumer.submit(make_request("a", PROMPT, greedy(3)))
    consumer.runner.entered.wait(TIMEOUT_S)
    visit = consumer.engine.run_between_steps(threading.get_ident)
    assert not visit.done()  # the step is held at its gate
    consumer.runner.gate.set()
    assert visit.result(TIMEOUT_S) != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        consumer.engine.run_between_steps(lambda: 1 // 0).result(TIMEOUT_S)
    consumer.receive_until_ended(*consumer.transcripts.values())
    consumer.assert_baseline()


def test_a_visit_of_a_stopped_engine_fails(consumer: Consumer) -> None:
    consumer.engine.stop()
    with pytest.raises(UnavailableError):
        consumer.engine.freeze().result(TIMEOUT_S)
