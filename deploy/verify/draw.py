"""How random requests of `moerelay verify` are sampled: every field of `sampling_params`, in legal combinations.

Legal means that a token is always left to sample: of what forbids tokens, at most one rule is drawn.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from common.sampling import INT64_MAX, INT64_MIN, SamplingParams
from deploy.verify.case import CaseLimits, TextRules

ValueT = TypeVar("ValueT")

#: Choices are computed one after the other by the solo run; shorter ones keep it at the pace of the cluster.
_MOST_TOKENS_OF_CHOICES = 16
#: From so many pieces on, a few can be forbidden or preferred.
_FEWEST_PIECES = 16
_NUM_FAVOURITES = 6
#: Makes a few ids so likely that texts made of them do occur, and so unlikely to win always that others occur too.
_FAVOUR = 8.0
#: What is asked for in each so many requests, in random order: short runs ask for everything too.
_RULES = ("stop", "stop", "stop", "bad_words", "grammar", "grammar", "allowed_token_ids", "", "", "")
_CHOICES = (1, 1, 1, 1, 1, 1, 1, 1, 2, 3)


def draw_sampling(
    rng: random.Random, seed: int, index: int, num_prompt: int, asked: int, limits: CaseLimits
) -> tuple[int, SamplingParams, TextRules]:
    """The `max_tokens` to ask for, and everything else; `asked` is the most."""
    n = _in_turn(_CHOICES, f"{seed}:choices", index)
    if n > 1:
        asked = min(asked, _MOST_TOKENS_OF_CHOICES)
    max_tokens = min(asked, limits.max_model_len - num_prompt)
    params = _told(rng, replace(_common(rng, max_tokens, limits), n=n), limits)
    params, text = _ruled(rng, _in_turn(_RULES, f"{seed}:rules", index), params, limits)
    return asked, params, text


def _in_turn(values: Sequence[ValueT], order: str, index: int) -> ValueT:
    """Each value once in every `len(values)` indices, in an order that the name of the order determines."""
    turn, at = divmod(index, len(values))
    return random.Random(f"{order}:{turn}").sample(values, len(values))[at]


def _common(rng: random.Random, max_tokens: int, limits: CaseLimits) -> SamplingParams:
    stop_ids = rng.sample(range(limits.vocab_size), k=min(64, max(1, limits.vocab_size // 20)))
    common = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=rng.randint(0, max_tokens) if rng.random() < 0.2 else 0,
        temperature=0.0,
        seed=rng.randint(INT64_MIN, INT64_MAX),
        stop_token_ids=frozenset(stop_ids if rng.random() < 0.3 else ()),
        ignore_eos=rng.random() < 0.5,
        logit_bias=_logit_bias(rng, limits),
    )
    if rng.random() < 0.25:
        common = _penalized(rng, common, limits)
    if rng.random() < 0.4:
        return common  # greedy
    return replace(
        common,
        temperature=round(rng.uniform(0.3, 1.5), 3),
        top_p=rng.choice((1.0, 0.9, 0.5)),
        top_k=rng.choice((0, 1, 5, 50)),
        min_p=rng.choice((0.0, 0.05, 0.2)),
    )


def _penalized(rng: random.Random, params: SamplingParams, limits: CaseLimits) -> SamplingParams:
    """Of a few ids that come again and again, or a penalty would have nothing to count."""
    often = rng.sample(range(limits.vocab_size), k=min(_NUM_FAVOURITES, limits.vocab_size))
    return replace(
        _favouring(params, often),
        presence_penalty=rng.choice((0.0, round(rng.uniform(-2, 2), 2))),
        frequency_penalty=rng.choice((0.0, round(rng.uniform(-2, 2), 2))),
        repetition_penalty=rng.choice((1.0, round(rng.uniform(0.7, 1.9), 2))),
    )


def _told(rng: random.Random, params: SamplingParams, limits: CaseLimits) -> SamplingParams:
    """What is told about the tokens."""
    return replace(
        params,
        logprobs=rng.choice((None, None, 0, 1, 5)),
        prompt_logprobs=rng.choice((0, 1, 4)) if rng.random() < 0.3 else None,
        sampling_mask=rng.random() < 0.2,
        processed_logprobs=limits.processed_logprobs,
    )


def _logit_bias(rng: random.Random, limits: CaseLimits) -> dict[int, float]:
    """Mostly none; sometimes a few nudges, sometimes an end-of-sequence token that is sure to come."""
    kind = rng.random()
    eos = [i for i in sorted(limits.eos_token_ids) if i < limits.vocab_size]
    if kind < 0.1 and eos:
        return {eos[0]: 100.0}
    if kind < 0.3:
        return {rng.randrange(limits.vocab_size): round(rng.uniform(-5, 5), 2) for _ in range(3)}
    return {}


def _ruled(
    rng: random.Random, rule: str, params: SamplingParams, limits: CaseLimits
) -> tuple[SamplingParams, TextRules]:
    """With a rule about what the output may hold, if the checkpoint can follow it."""
    has_pieces = len(limits.pieces) >= _FEWEST_PIECES
    if rule == "stop" and has_pieces:
        return _with_stop(rng, params, limits)
    if rule == "bad_words" and has_pieces:
        return _with_bad_words(rng, params, limits)
    if rule == "grammar" and limits.grammars:
        return replace(params, min_tokens=0, stop_token_ids=frozenset()), TextRules(grammar=rng.choice(limits.grammars))
    if rule == "allowed_token_ids":
        return replace(params, allowed_token_ids=_allowed(rng, params, limits)), TextRules()
    return params, TextRules()


def _with_stop(rng: random.Random, params: SamplingParams, limits: CaseLimits) -> tuple[SamplingParams, TextRules]:
    """One to three strings: inside of a token, over the border of two, or of two tokens."""
    favourites = rng.sample(limits.pieces, _NUM_FAVOURITES)
    stops = []
    for _ in range(rng.randint(1, 3)):
        (_, a), (_, b) = rng.sample(favourites, 2)
        a = a.strip(" ")
        stops.append(rng.choice((a, a[-1:] + b[:1], a + b, a[-1:])))
    text = TextRules(stop=tuple(stops), skip_special_tokens=rng.random() < 0.7)
    return _favouring(params, [token_id for token_id, _ in favourites]), text


def _with_bad_words(rng: random.Random, params: SamplingParams, limits: CaseLimits) -> tuple[SamplingParams, TextRules]:
    """One that is a token that would come often, with a space and without, and one that two such tokens spell."""
    texts = {text for _, text in limits.pieces}
    twins = sorted(text for text in texts if " " + text in texts)
    single = rng.choice(twins or sorted(texts))
    forms = [piece for piece in limits.pieces if piece[1].strip(" ") == single.strip(" ")]
    favourites = rng.sample(limits.pieces, _NUM_FAVOURITES)
    (_, a), (_, b) = favourites[:2]
    words = (single, a + b.lstrip(" "))
    return _favouring(params, [token_id for token_id, _ in (*forms, *favourites)]), TextRules(bad_words=words)


def _favouring(params: SamplingParams, token_ids: Sequence[int]) -> SamplingParams:
    return replace(params, logit_bias=params.logit_bias | dict.fromkeys(token_ids, _FAVOUR))


def _allowed(rng: random.Random, params: SamplingParams, limits: CaseLimits) -> frozenset[int]:
    """A few ids, one of which at least does not end the output; none where every id does."""
    ending = params.stop_token_ids | limits.eos_token_ids
    going_on = [i for i in range(limits.vocab_size) if i not in ending]
    if not going_on:
        return frozenset()
    some = rng.sample(range(limits.vocab_size), k=min(rng.choice((1, 8, 64)), limits.vocab_size))
    return frozenset((rng.choice(going_on), *some))
