"""Survivors, processed logprobs, the order of the steps, and batches of everything at once."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from common.engine.grammar import GrammarCompiler
from common.engine.sampler import SampleSpec, sample
from common.errors import InvalidRequestError
from common.id_mask import pack_ids
from common.model.tokenizer_training import train_tokenizer
from common.sampling import SampledToken, SamplingParams

NO_EOS = frozenset[int]()


def draw(logits: list[float], params: SamplingParams, token_ids: list[int] | None = None) -> SampledToken:
    """The token after a prompt of one token 0 and `token_ids`."""
    spec = SampleSpec.of(params, NO_EOS, token_ids=[0, *(token_ids or [])], num_prompt=1)
    [result] = sample(torch.tensor([logits]), [spec])
    assert isinstance(result, SampledToken), result
    return result


def log_of(*weights: float) -> list[float]:
    return [math.log(w) if w else -math.inf for w in weights]


def told(token: SampledToken) -> dict[int, float]:
    return {t.token_id: t.logprob for t in token.top}


def log_softmax(logits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Of float64 values, some of which may be -inf."""
    shifted = logits - logits.max()
    result: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return result


# --- survivors


@pytest.mark.parametrize(
    ("params", "survivors"),
    [
        (SamplingParams(1), (0, 1, 2, 3)),
        (SamplingParams(1, top_k=2), (1, 3)),
        (SamplingParams(1, top_p=0.71), (0, 1, 3)),
        (SamplingParams(1, min_p=0.5), (1, 3)),
        (SamplingParams(1, temperature=0), (3,)),
        (SamplingParams(1, temperature=0, top_k=3), (3,)),
        (SamplingParams(1, allowed_token_ids=frozenset({0, 2})), (0, 2)),
        (SamplingParams(1, allowed_token_ids=frozenset({0, 2}), top_k=3), (0, 2)),
        (SamplingParams(1, bad_words=((3,),), top_k=2), (0, 1)),
        (SamplingParams(1, temperature=1e-310), (0, 1, 2, 3)),
    ],
)
def test_the_mask_lists_what_survived(params: SamplingParams, survivors: tuple[int, ...]) -> None:
    logits = log_of(0.19, 0.3, 0.11, 0.4)
    token = draw(logits, replace(params, sampling_mask=True))
    assert token.mask == pack_ids(survivors)
    assert token.token_id in survivors
    assert draw(logits, params).mask is None


# --- processed logprobs


def test_processed_logprobs_are_those_of_the_distribution_that_is_sampled_from() -> None:
    params = SamplingParams(1, temperature=0.5, top_k=2, logprobs=4, processed_logprobs=True)
    token = draw(log_of(0.1, 0.2, 0.3, 0.4), params)  # squared and renormalised: 9 / 25 and 16 / 25
    assert told(token) == {
        3: pytest.approx(math.log(0.64), abs=1e-6),
        2: pytest.approx(math.log(0.36), abs=1e-6),
        0: -math.inf,
        1: -math.inf,
    }
    assert token.logprob is not None
    assert token.logprob.logprob == told(token)[token.token_id]
    assert token.logprob.rank == {3: 1, 2: 2}[token.token_id]
    assert [t.rank for t in token.top] == [1, 2, 3, 3]


def test_processed_logprobs_of_greedy_tokens_have_penalties_and_no_temperature() -> None:
    params = SamplingParams(1, temperature=0, logit_bias={0: math.log(8)}, logprobs=2, processed_logprobs=True)
    token = draw(log_of(0.1, 0.2, 0.3, 0.4), params)
    assert token.token_id == 0
    assert told(token) == {
        0: pytest.approx(math.log(0.8 / 1.7), abs=1e-6),
        3: pytest.approx(math.log(0.4 / 1.7), abs=1e-6),
    }


def test_raw_logprobs_know_nothing_of_masks() -> None:
    params = SamplingParams(1, allowed_token_ids=frozenset({0}), repetition_penalty=2.0, logprobs=1)
    token = draw(log_of(0.1, 0.2, 0.3, 0.4), params)
    assert token.token_id == 0
    assert token.logprob is not None
    assert token.logprob.logprob == pytest.approx(math.log(0.1), abs=1e-6)
    assert token.logprob.rank == 4
    assert told(token) == {3: pytest.approx(math.log(0.4), abs=1e-6)}


@settings(max_examples=200, deadline=None)
@given(
    logits=st.lists(st.floats(-20, 20, width=32), min_size=5, max_size=5),
    bias=st.floats(-10, 10, width=32),
    repetition=st.sampled_from([0.5, 1.0, 1.5]),
    presence=st.sampled_from([-1.0, 0.0, 0.75]),
    generated=st.lists(st.integers(0, 4), max_size=6),
    forbidden=st.integers(0, 4),
    temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
)
def test_the_steps_come_in_vllms_order(
    logits: list[float],
    bias: float,
    repetition: float,
    presence: float,
    generated: list[int],
    forbidden: int,
    temperature: float,
) -> None:
    """Mask, bias, repetition, presence, temperature, softmax: recomputed in float32 up to the penalties."""
    f32 = np.float32
    values = [f32(v) for v in logits]
    values[2] += f32(bias)
    for i in {0, *generated}:
        values[i] = values[i] / f32(repetition) if values[i] > 0 else values[i] * f32(repetition)
    for i in set(generated):
        values[i] -= f32(presence)
    values[forbidden] = f32(-np.inf)
    want = log_softmax(np.array(values, np.float64) / (temperature or 1.0))
    params = SamplingParams(
        1,
        temperature=temperature,
        logit_bias={2: bias},
        repetition_penalty=repetition,
        presence_penalty=presence,
        bad_words=((forbidden,),),
        logprobs=5,
        processed_logprobs=True,
    )
    token = draw(logits, params, generated)
    got = told(token)
    np.testing.assert_allclose([got[i] for i in range(5)], want, rtol=1e-6, atol=1e-6)
    if temperature == 0:
        assert token.token_id == int(np.argmax(np.array(values)))


# --- batches

VOCAB = 280


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_tokenizer(270).save(str(path))
    return GrammarCompiler(Path(path), VOCAB, frozenset({1}))


IDS = st.integers(0, VOCAB - 1)
PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.just(99),
    min_tokens=st.sampled_from([0, 3]),
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    top_p=st.sampled_from([0.8, 1.0]),
    top_k=st.sampled_from([0, 5, 1000]),
    min_p=st.sampled_from([0.0, 0.05]),
    seed=st.integers(-(2**63), 2**63 - 1),
    stop_token_ids=st.frozensets(IDS, max_size=2),
    logprobs=st.sampled_from([None, 0, 4]),
    logit_bias=st.dictionaries(IDS, st.floats(-100, 100), max_size=2),
    presence_penalty=st.sampled_from([0.0, 1.1]),
    frequency_penalty=st.sampled_from([0.0, -0.3]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    allowed_token_ids=st.just(frozenset()) | st.frozensets(IDS, min_size=1, max_size=200),
    bad_words=st.lists(st.lists(IDS, min_size=1, max_size=2).map(tuple), max_size=3).map(tuple),
    processed_logprobs=st.booleans(),
    sampling_mask=st.booleans(),
)
ROW = st.tuples(PARAMS, st.lists(IDS, min_size=1, max_size=12), st.integers(0, 3), st.booleans())


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(ROW, min_size=2, max_size=8), seed=st.integers(0, 2**32 - 1))
def test_a_row_does_not_depend_on_its_batch(
    compiler: GrammarCompiler, rows: list[tuple[SamplingParams, list[int], int, bool]], seed: int
) -> None:
    logits_NV = torch.from_numpy(np.random.default_rng(seed).standard_normal((len(rows), VOCAB), np.float32) * 4)
    matcher = compiler.compile(LLMatcher.grammar_from_regex("[a-z ]+"))
    specs = [
        SampleSpec.of(
            params,
            frozenset({1}),
            token_ids=token_ids,
            num_prompt=min(2, len(token_ids)),
            choice=choice,
            matcher=matcher.fork() if has_grammar else None,
            weight_version="7",
        )
        for params, token_ids, choice, has_grammar in rows
    ]
    before = logits_NV.clone()
    together = sample(logits_NV, specs)
    assert torch.equal(logits_NV, before)
    for row, spec in enumerate(specs):
        [alone] = sample(logits_NV[row : row + 1].clone(), [spec])
        if isinstance(alone, SampledToken):
            assert together[row] == alone
            assert alone.weight_version == "7"
        else:
            assert isinstance(alone, InvalidRequestError)
            assert str(together[row]) == str(alone)


def test_choices_draw_different_numbers() -> None:
    logits_NV = torch.zeros(64, 1000)
    specs = [SampleSpec.of(SamplingParams(1, seed=3), NO_EOS, token_ids=[5], num_prompt=1, choice=i) for i in range(64)]
    drawn = [r.token_id for r in sample(logits_NV, specs) if isinstance(r, SampledToken)]
    assert len(set(drawn)) > 50
