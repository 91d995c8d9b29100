"""The engine's thread: commands from other threads, back-pressure, start and stop."""

import ctypes
import queue
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from common.engine.loop import MAX_OUTSTANDING_BATCHES
from common.engine.request import Progress, PromptAdvanced, RequestId, Work
from common.errors import (
    DuplicateRequestError,
    InvalidRequestError,
    OverloadedError,
    UnavailableError,
)
from common.model.batch import Chunk
from common.sampling import Finish, FinishReason, SampledToken
from tests.unit.engine.consumer import PROMPT, TIMEOUT_S, Consumer
from tests.unit.engine.rig import Transcript, copy_slots, greedy, make_request, solo


def test_many_requests_from_another_thread_equal_their_solo_runs(consumer: Consumer) -> None:
    requests = [make_request(f"r{i}", PROMPT[: 1 + i % 5], greedy(1 + i % 7)) for i in range(40)]
    transcripts = [consumer.submit(r) for r in requests]
    consumer.receive_until_ended(*transcripts)
    for transcript in transcripts:
        transcript.assert_equals(solo(transcript.request))
    consumer.assert_baseline()


def test_a_handoff_between_two_engines_equals_a_solo_run(consumer: Consumer) -> None:
    prefiller = Consumer()
    prefiller.engine.start()
    there = prefiller.submit(make_request("a", PROMPT, greedy(4), work=Work.PREFILL))
    here = consumer.submit(make_request("a", PROMPT, greedy(4), work=Work.DECODE))
    while here.blocks is None:
        consumer.receive()
    while not there.first_tokens:
        prefiller.receive()
        copy_slots(prefiller.store, there, consumer.store, here)
        consumer.engine.handoff_advanced(RequestId("a"), there.advances[-1].computed)
    consumer.engine.commit_handoff(RequestId("a"), there.first_tokens)
    prefiller.engine.cancel(RequestId("a"))
    consumer.receive_until_ended(here)
    here.assert_equals(solo(here.request))
    prefiller.assert_baseline()
    consumer.assert_baseline()


def test_a_prefill_is_held_until_it_is_released(consumer: Consumer) -> None:
    prefill = consumer.submit(make_request("p", PROMPT, greedy(3), work=Work.PREFILL))
    while not prefill.first_tokens:
        consumer.receive()
    assert consumer.engine.check_invariants() == []
    assert consumer.engine.load().handoffs == 1
    consumer.engine.cancel(RequestId("p"))
    consumer.assert_baseline()


# --- refusals


def test_refusals_are_raised_where_submit_is_called(consumer: Consumer) -> None:
    consumer.runner.gate.clear()
    consumer.submit(make_request("a", PROMPT, greedy(3)))
    with pytest.raises(DuplicateRequestError):
        consumer.engine.submit(make_request("a", PROMPT, greedy(3)))
    with pytest.raises(InvalidRequestError):
        consumer.engine.submit(make_request("b", [], greedy(3)))


def test_a_full_line_is_refused_and_serves_those_in_it() -> None:
    consumer = Consumer(max_waiting=1)
    first = consumer.submit(make_request("a", PROMPT, greedy(3)))
    with pytest.raises(OverloadedError):
        consumer.engine.submit(make_request("b", PROMPT, greedy(3)))
    consumer.engine.start()
    consumer.receive_until_ended(first)
    second = consumer.submit(make_request("b", PROMPT, greedy(3)))
    consumer.receive_until_ended(second)
    consumer.assert_baseline()


# --- ends


def test_an_abort_during_a_step_takes_effect_after_it(consumer: Consumer) -> None:
    consumer.runner.gate.clear()
    got = consumer.submit(make_request("a", PROMPT[:3], greedy(9)))
    assert consumer.runner.entered.wait(TIMEOUT_S)
    consumer.engine.abort(RequestId("a"))
    consumer.engine.abort(RequestId("a"))
    consumer.runner.gate.set()
    consumer.receive_until_ended(got)
    assert got.finish == Finish(FinishReason.ABORT)
    assert len(got.tokens) == 1
    assert sum(len(rows) for rows in got.rows) == 3
    consumer.assert_baseline()


def test_one_choice_is_aborted_and_then_the_request(consumer: Consumer) -> None:
    consumer.runner.gate.clear()
    got = consumer.submit(make_request("a", PROMPT[:3], replace(greedy(9), n=3)))
    assert consumer.runner.entered.wait(TIMEOUT_S)
    for choice in (1, 1, 7):
        consumer.engine.abort(RequestId("a"), choice)
    consumer.runner.gate.set()
    while not got.all[1].ended:
        consumer.receive()
    consumer.engine.abort(RequestId("a"))
    while not got.request_ended:
        consumer.receive()
    assert got.all[1].finish == Finish(FinishReason.ABORT)
    assert len(got.all[1].tokens) == 1
    consumer.assert_baseline()


def test_a_cancel_frees_and_unknown_ids_are_ignored(consumer: Consumer) -> None:
    consumer.runner.gate.clear()
    consumer.submit(make_request("a", PROMPT, greedy(9)))
    for name in ("a", "a", "never seen"):
        consumer.engine.cancel(RequestId(name))
    consumer.engine.abort(RequestId("never seen"))
    consumer.engine.commit_handoff(RequestId("never seen"), [SampledToken(1)])
    consumer.runner.gate.set()
    consumer.assert_baseline()


# --- back-pressure


def test_a_slow_consumer_stops_the_engine_instead_of_filling_memory(consumer: Consumer) -> None:
    request = make_request("a", PROMPT[:1], greedy(100))
    got = consumer.transcripts[request.request_id] = Transcript(request)
    consumer.engine.submit(request)
    first = [consumer.batches.get(timeout=TIMEOUT_S) for _ in range(MAX_OUTSTANDING_BATCHES)]
    with pytest.raises(queue.Empty):
        consumer.batches.get(timeout=0.2)  # nothing may come: the one wait in these tests that has to run out
    assert len(consumer.runner.batches) <= MAX_OUTSTANDING_BATCHES + 1
    for events in first:
        for event in events:
            got.take(event)
        consumer.engine.events_delivered()
    consumer.receive_until_ended(got)
    got.assert_equals(solo(request))


def test_stop_ends_an_engine_that_waits_for_its_consumer(consumer: Consumer) -> None:
    consumer.submit(make_request("a", PROMPT[:1], greedy(100)))
    for _ in range(MAX_OUTSTANDING_BATCHES):
        consumer.batches.get(timeout=TIMEOUT_S)
    consumer.engine.stop()
    assert not consumer.engine.alive
    assert consumer.engine.load().kv_blocks_used == 0


# --- start and stop


def test_stop_fails_what_is_live_and_refuses_what_comes(consumer: Consumer) -> None:
    consumer.runner.gate.clear()
    running = consumer.submit(make_request("running", PROMPT, greedy(9)))
    assert consumer.runner.entered.wait(TIMEOUT_S)
    queued = consumer.submit(make_request("queued", PROMPT, greedy(9)))
    stopper = threading.Thread(target=consumer.engine.stop)
    stopper.start()
    consumer.runner.gate.set()
    consumer.receive_until_ended(running, queued)
    stopper.join(TIMEOUT_S)
    assert isinstance(running.error, UnavailableError)
    assert isinstance(queued.error, UnavailableError)
    with pytest.raises(UnavailableError):
        consumer.engine.submit(make_request("late", PROMPT, greedy(9)))
    assert consumer.engine.check_invariants() == ["the engine thread is not running"]
    assert consumer.engine.load().kv_blocks_used == 0


def test_an_engine_that_never_started_stops() -> None:
    engine = Consumer().engine
    engine.stop()
    assert not engine.alive


def test_every_event_of_a_step_comes_in_one_batch(consumer: Consumer) -> None:
    consumer.runner.gate.clear()
    consumer.submit(make_request("first", PROMPT[:1], greedy(1)))
    assert consumer.runner.entered.wait(TIMEOUT_S)
    names = ["a", "b", "c"]
    for name in names:
        consumer.submit(make_request(name, PROMPT[:1], greedy(1)))
    consumer.submit(make_request("p", PROMPT[:1], greedy(1), work=Work.PREFILL))
    consumer.runner.gate.set()
    consumer.receive()
    events = consumer.receive()
    assert [e.request_id for e in events] == [*names, "p"]
    assert [type(e) for e in events] == [Progress] * 3 + [PromptAdvanced]


def test_the_engine_computes_with_the_threads_of_whoever_starts_it() -> None:
    """Asked of OpenMP itself: torch's own answer would set what it reports."""
    paths = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libgomp" in line}
    if len(paths) != 1:
        pytest.skip("torch runs without GNU OpenMP here")
    max_threads = ctypes.CDLL(paths.pop()).omp_get_max_threads
    seen: list[int] = []

    def look(chunks: Sequence[Chunk]) -> bool:
        seen.append(max_threads())
        return False

    consumer, before = Consumer(), torch.get_num_threads()
    consumer.runner.fails_on = look
    torch.set_num_threads(before + 3)
    try:
        consumer.engine.start()
        consumer.receive_until_ended(consumer.submit(make_request("a", PROMPT, greedy(1))))
        consumer.assert_baseline()
    finally:
        torch.set_num_threads(before)
    assert set(seen) == {before + 3}


def test_what_prepares_the_thread_runs_on_it_before_any_step() -> None:
    consumer = Consumer()
    order: list[tuple[str, str]] = []

    def look(chunks: Sequence[Chunk]) -> bool:
        order.append(("step", threading.current_thread().name))
        return False

    consumer.runner.fails_on = look
    consumer.engine.start(lambda: order.append(("prepare", threading.current_thread().name)))
    consumer.receive_until_ended(consumer.submit(make_request("a", PROMPT, greedy(1))))
    consumer.assert_baseline()
    assert order[:2] == [("prepare", "engine"), ("step", "engine")]
