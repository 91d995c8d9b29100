"""Which ids may not be sampled next: those that the grammar forbids, that are not on the list of allowed ones, that
would complete a bad word, or that would end the output too early.

Shape suffix: V vocabulary.
"""

import math
from collections.abc import Iterable, Sequence

import torch

from common.engine.grammar import GrammarMatcher
from common.errors import InvalidRequestError
from common.sampling import SamplingParams


def asks_for_mask(params: SamplingParams, early: frozenset[int], matcher: GrammarMatcher | None) -> bool:
    return bool(matcher is not None or params.allowed_token_ids or params.bad_words or early)


def mask_row(
    logits_V: torch.Tensor,
    params: SamplingParams,
    early: frozenset[int],
    generated: Sequence[int],
    matcher: GrammarMatcher | None,
) -> None:
    """Sets the logits of forbidden ids to -inf, in place.

    Args:
        early: stop and end-of-sequence ids while `min_tokens` forbids them; ids beyond the vocabulary are ignored.

    Raises:
        InvalidRequestError: the grammar's parser hit one of its limits.
    """
    if matcher is not None:
        allowed_V = torch.from_numpy(matcher.allowed()).to(logits_V.device)
        logits_V.masked_fill_(~allowed_V, -math.inf)
    if params.allowed_token_ids:
        forbidden_V = torch.ones_like(logits_V, dtype=torch.bool)
        forbidden_V[_index(params.allowed_token_ids, logits_V)] = False
        logits_V.masked_fill_(forbidden_V, -math.inf)
    forbidden = early.union(bad_word_ends(params.bad_words, generated))
    if forbidden:
        logits_V[_index(forbidden, logits_V)] = -math.inf


def bad_word_ends(bad_words: Iterable[tuple[int, ...]], generated: Sequence[int]) -> list[int]:
    """The last id of every bad word that the generated tokens, which end with all its other ids, would complete."""
    return [
        word[-1]
        for word in bad_words
        if len(word) <= len(generated) + 1 and tuple(generated[len(generated) + 1 - len(word) :]) == word[:-1]
    ]


def nothing_left(params: SamplingParams, early: frozenset[int], matcher: GrammarMatcher | None) -> InvalidRequestError:
    """The error of a row whose every id is forbidden; names everything that may be the cause."""
    causes = {
        "structured_outputs": matcher is not None,
        "allowed_token_ids": bool(params.allowed_token_ids),
        "bad_words": bool(params.bad_words),
        "min_tokens": bool(early),
        "repetition_penalty": params.repetition_penalty != 1,
    }
    names = [name for name, is_cause in causes.items() if is_cause]
    if names == ["min_tokens"]:
        message = "every token of the vocabulary is a stop token, so min_tokens cannot be reached; lower one of them"
    else:
        message = f"{', '.join(names)} together leave no token to sample; loosen one of them"
    return InvalidRequestError(message, param=names[0])


def _index(ids: Iterable[int], logits_V: torch.Tensor) -> torch.Tensor:
    size = len(logits_V)
    known = [i for i in ids if i < size]  # a stop id beyond the vocabulary is never sampled
    return torch.tensor(known, dtype=torch.int64, device=logits_V.device)
