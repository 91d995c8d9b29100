"""Bounds of sampling parameters. The router checks them too; a peer that skips it must not reach the sampler."""

import math
from collections.abc import Iterable

from common.errors import InvalidRequestError
from common.sampling import SamplingParams

#: The ranges of the OpenAI API.
MAX_LOGIT_BIAS = 100
MAX_PENALTY = 2

#: As the router has it. What matters is that a product with a logit stays finite, and that the penalty is not 0 in
#: fp32: a forbidden id's logit of -inf would become NaN.
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 2

#: Whatever the router lets through: each choice has its state and its events, before any of it is computed.
MAX_CHOICES = 2**16


def check_sampling(params: SamplingParams, vocab_size: int) -> None:
    """Refuses whatever would leave the sampler without a distribution, or with an index out of range.

    Comparisons are written so that NaN fails them.

    Raises:
        InvalidRequestError: names the field, its value and its bound.
    """
    if not 1 <= params.n <= MAX_CHOICES:
        raise InvalidRequestError(f"n must be in [1, {MAX_CHOICES}], got {params.n}", param="n")
    _check_distribution(params)
    _check_penalties(params)
    _check_ids("logit_bias", params.logit_bias, vocab_size)
    _check_ids("allowed_token_ids", params.allowed_token_ids, vocab_size)
    for word in params.bad_words:
        if not word:
            raise InvalidRequestError("a bad word has no tokens; leave it out", param="bad_words")
        _check_ids("bad_words", word, vocab_size)
    for name, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if count is not None and not 0 <= count <= vocab_size:
            raise InvalidRequestError(f"{name} must be in [0, {vocab_size}], got {count}", param=name)


def _check_distribution(params: SamplingParams) -> None:
    if not 0 <= params.temperature < math.inf:
        raise InvalidRequestError(f"temperature must be finite and >= 0, got {params.temperature}", param="temperature")
    if not 0 < params.top_p <= 1:
        raise InvalidRequestError(f"top_p must be in (0, 1], got {params.top_p}", param="top_p")
    if params.top_k < 0:
        raise InvalidRequestError(f"top_k must be at least 0, got {params.top_k}", param="top_k")
    if not 0 <= params.min_p <= 1:
        raise InvalidRequestError(f"min_p must be in [0, 1], got {params.min_p}", param="min_p")


def _check_penalties(params: SamplingParams) -> None:
    for name, penalty in (
        ("presence_penalty", params.presence_penalty),
        ("frequency_penalty", params.frequency_penalty),
    ):
        if not -MAX_PENALTY <= penalty <= MAX_PENALTY:
            raise InvalidRequestError(f"{name} must be in [-{MAX_PENALTY}, {MAX_PENALTY}], got {penalty}", param=name)
    if not MIN_REPETITION_PENALTY <= params.repetition_penalty <= MAX_REPETITION_PENALTY:
        raise InvalidRequestError(
            f"repetition_penalty must be in [{MIN_REPETITION_PENALTY}, {MAX_REPETITION_PENALTY}], "
            f"got {params.repetition_penalty}",
            param="repetition_penalty",
        )
    if not all(abs(bias) <= MAX_LOGIT_BIAS for bias in params.logit_bias.values()):
        raise InvalidRequestError(f"logit_bias values must be in [-100, {MAX_LOGIT_BIAS}]", param="logit_bias")


def _check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequestError(f"{name}: {token_id} is outside the vocabulary [0, {vocab_size})", param=name)
