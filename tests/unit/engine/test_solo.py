"""The oracle itself, against what the fake model is defined to do."""

import zlib

import numpy as np
import pytest

from common.engine.solo import SoloRunner
from common.errors import InternalError, InvalidRequestError, RoutingMissingError
from common.sampling import Finish, FinishReason
from tests.fakes.fake_runner import VOCAB_SIZE, FakeRunner, fake_store, rows_of
from tests.unit.engine.rig import EOS, greedy

PROMPT = [5, 6, 7]


def hash_of(tokens: list[int]) -> int:
    """FakeRunner's hash of a history, computed without a store: two layers, each K then V."""
    value = 0
    for position, token in enumerate(tokens):
        value = zlib.crc32(np.array([token + 1, position + 1] * 2, np.float32).tobytes(), value)
    return value


def expected_tokens(prompt: list[int], count: int) -> list[int]:
    history = list(prompt)
    for _ in range(count):
        logits_V = np.random.default_rng(hash_of(history)).standard_normal(VOCAB_SIZE, np.float32)
        history.append(int(logits_V.argmax()))
    return history[len(prompt) :]


def test_a_solo_run_is_one_chunk_and_then_one_token_at_a_time() -> None:
    store = fake_store(8)
    runner = FakeRunner(store)
    result = SoloRunner(runner, store, EOS).run(PROMPT, greedy(4))
    assert [t.token_id for t in result.tokens] == expected_tokens(PROMPT, 4)
    assert result.finish == Finish(FinishReason.LENGTH)
    assert [[(c.start, c.end) for c in batch] for batch in runner.batches] == [[(0, 3)], [(3, 4)], [(4, 5)], [(5, 6)]]


def test_rows_are_those_of_every_forwarded_position() -> None:
    store = fake_store(8)
    result = SoloRunner(FakeRunner(store), store, EOS).run(PROMPT, greedy(4), routing_start=1)
    history = [*PROMPT, *expected_tokens(PROMPT, 3)]
    want = rows_of([hash_of(history[: i + 1]) for i in range(1, 6)])
    np.testing.assert_array_equal(result.rows_TLK, want, strict=True)


def test_runs_do_not_disturb_each_other() -> None:
    store = fake_store(8)
    solo = SoloRunner(FakeRunner(store), store, EOS)
    first = solo.run(PROMPT, greedy(4))
    solo.run([9] * 10, greedy(9))
    again = solo.run(PROMPT, greedy(4))
    assert again.tokens == first.tokens
    np.testing.assert_array_equal(again.rows_TLK, first.rows_TLK)


def test_routing_off_gives_no_rows() -> None:
    store = fake_store(8)
    assert SoloRunner(FakeRunner(store), store, EOS).run(PROMPT, greedy(2), routing_start=None).rows_TLK is None


def test_faults_are_raised() -> None:
    store = fake_store(4)
    runner = FakeRunner(store)
    solo = SoloRunner(runner, store, EOS)
    with pytest.raises(InvalidRequestError, match="needs 4 KV blocks, but the store has 3"):
        solo.run(PROMPT, greedy(11))
    runner.lost_rows = lambda chunk, position: position == 1
    with pytest.raises(RoutingMissingError):
        solo.run(PROMPT, greedy(2))
    runner.nan_after = lambda chunk: True
    with pytest.raises(InternalError):
        solo.run(PROMPT, greedy(2))
