"""The oracle itself, against what the fake model is defined to do."""

import re
import zlib
from pathlib import Path

import numpy as np
import pytest
from llguidance import LLMatcher

from common.engine.grammar import GrammarCompiler
from common.engine.solo import SoloRunner
from common.errors import InternalError, InvalidRequestError, RoutingMissingError
from common.model.tokenizer_training import MIN_VOCAB_SIZE, train_tokenizer
from common.sampling import Finish, FinishReason, SamplingParams
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


def test_prompt_logprobs_are_those_of_every_position_but_the_first() -> None:
    store = fake_store(8)
    sampling = SamplingParams(2, temperature=0, prompt_logprobs=3)
    entries = SoloRunner(FakeRunner(store), store, EOS).run(PROMPT, sampling).prompt_logprobs
    assert entries is not None
    assert entries.shape == (len(PROMPT), 4)
    assert entries[0].tobytes() == bytes(4 * 12)
    for position in (1, 2):
        logits_V = np.random.default_rng(hash_of(PROMPT[:position])).standard_normal(VOCAB_SIZE, np.float32)
        ids = [PROMPT[position], *np.argsort(-logits_V)[:3]]
        assert entries[position]["token_id"].tolist() == ids
        assert entries[position]["rank"].tolist() == [1 + int((logits_V > logits_V[i]).sum()) for i in ids]
        logprobs_V = logits_V.astype(np.float64) - np.log(np.exp(logits_V.astype(np.float64)).sum())
        np.testing.assert_allclose(entries[position]["logprob"], logprobs_V[ids], rtol=1e-5)


def test_a_prompt_of_one_token_has_one_blank_prompt_logprob() -> None:
    store = fake_store(8)
    result = SoloRunner(FakeRunner(store), store, EOS).run([5], SamplingParams(1, prompt_logprobs=0))
    assert result.prompt_logprobs is not None
    assert result.prompt_logprobs.shape == (1, 1)
    assert SoloRunner(FakeRunner(store), store, EOS).run([5], SamplingParams(1)).prompt_logprobs is None


def test_each_choice_is_drawn_with_numbers_of_its_own() -> None:
    store = fake_store(8)
    solo = SoloRunner(FakeRunner(store), store, EOS, weight_version="v3")
    sampling = SamplingParams(8, seed=1, ignore_eos=True)
    choices = [solo.run(PROMPT, sampling, choice=i).tokens for i in range(4)]
    assert choices[0] == solo.run(PROMPT, sampling).tokens
    assert len({tuple(t.token_id for t in tokens) for tokens in choices}) == 4
    assert {t.weight_version for tokens in choices for t in tokens} == {"v3"}


def test_the_grammar_is_followed_and_left_as_it_was(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(MIN_VOCAB_SIZE)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    # The fake model has as many ids as there are special tokens and signs from "!" on, nearly.
    matcher = GrammarCompiler(tmp_path / "tokenizer.json", VOCAB_SIZE, EOS).compile(
        LLMatcher.grammar_from_regex(r"[#$%]{2}(!!)?")
    )
    store = fake_store(8)
    solo = SoloRunner(FakeRunner(store), store, EOS)
    texts = set()
    for seed in range(12):
        sampling = SamplingParams(9, seed=seed, grammar="given")
        result = solo.run(PROMPT, sampling, matcher=matcher)
        assert result.finish == Finish(FinishReason.STOP)
        assert result.tokens[-1].token_id in EOS
        texts.add(tokenizer.decode([t.token_id for t in result.tokens[:-1]]))
    assert all(re.fullmatch(r"[#$%]{2}(!!)?", text) for text in texts)
    assert len(texts) > 4


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
