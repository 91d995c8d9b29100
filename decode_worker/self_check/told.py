"""What a choice was told, or should have been, in one form; and where two of them differ first."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from common.engine.solo import SoloResult
from common.prompt_logprobs import PromptLogprobs
from common.routing.record import RoutingArray
from common.sampling import Finish, SampledToken, TokenLogprob


class Kind(StrEnum):
    """What can differ; the values are those of the metric's label."""

    TOKEN_IDS = "token_ids"
    LOGPROBS = "logprobs"
    SAMPLING_MASK = "sampling_mask"
    ROUTED_EXPERTS = "routed_experts"
    PROMPT_LOGPROBS = "prompt_logprobs"
    FINISH_REASON = "finish_reason"
    #: The solo run ended in an error, although the request had not.
    SOLO_RUN = "solo_run"


_Rows = RoutingArray | PromptLogprobs | None

#: Position in the sequence, prompt included, of the first difference of each kind.
Differences = dict[Kind, int]


@dataclass(frozen=True, slots=True)
class Told:
    """One choice, whole. `rows_TLK` begins at the request's `routing_start`."""

    tokens: Sequence[SampledToken]
    rows_TLK: RoutingArray | None
    finish: Finish
    prompt_logprobs: PromptLogprobs | None = None

    @classmethod
    def of(cls, solo: SoloResult) -> "Told":
        return cls(solo.tokens, solo.rows_TLK, solo.finish, solo.prompt_logprobs)


def compare(one: Told, other: Told, num_prompt: int, routing_start: int | None) -> Differences:
    """Bit for bit; labels of weights do not count.

    Args:
        num_prompt: tokens of the prompt, which come before those of the choice.
        routing_start: position of the first row.
    """
    found: Differences = {}
    pairs = list(zip(one.tokens, other.tokens, strict=False))
    for kind, view in ((Kind.TOKEN_IDS, _id), (Kind.LOGPROBS, _logprobs), (Kind.SAMPLING_MASK, _mask)):
        index = next((i for i, (a, b) in enumerate(pairs) if view(a) != view(b)), None)
        if index is not None:
            found[kind] = num_prompt + index
    if len(one.tokens) != len(other.tokens):
        found.setdefault(Kind.TOKEN_IDS, num_prompt + len(pairs))
    for kind, (a, b), start in (
        (Kind.ROUTED_EXPERTS, (one.rows_TLK, other.rows_TLK), routing_start or 0),
        (Kind.PROMPT_LOGPROBS, (one.prompt_logprobs, other.prompt_logprobs), 0),
    ):
        row = _first_row(a, b)
        if row is not None:
            found[kind] = start + row
    if one.finish != other.finish:
        found[Kind.FINISH_REASON] = num_prompt + min(len(one.tokens), len(other.tokens)) - 1
    return found


def _id(token: SampledToken) -> object:
    return token.token_id


def _mask(token: SampledToken) -> object:
    return token.mask


def _logprobs(token: SampledToken) -> object:
    """With the bits of each float32, because a NaN equals nothing and the two zeros each other."""
    return [_bits(logprob) for logprob in _all_logprobs(token)]


def _all_logprobs(token: SampledToken) -> Iterator[TokenLogprob]:
    if token.logprob is not None:
        yield token.logprob
    yield from token.top


def _bits(value: TokenLogprob) -> tuple[int, bytes, int]:
    return value.token_id, np.float32(value.logprob).tobytes(), value.rank


def _first_row(one: _Rows, other: _Rows) -> int | None:
    """Index of the first row that is not the same; also where one of the two ends."""
    if one is None or other is None:
        longer = other if one is None else one
        return None if longer is None or not len(longer) else 0
    if one.dtype != other.dtype or one.shape[1:] != other.shape[1:]:
        return 0
    shared = min(len(one), len(other))
    # As bytes: what is compared are bits, and records of floats have NaNs.
    equal_T = _rows_as_bytes(one[:shared]) == _rows_as_bytes(other[:shared])
    different = np.flatnonzero(~equal_T.all(axis=1))
    if len(different):
        return int(different[0])
    return None if len(one) == len(other) else shared


def _rows_as_bytes(rows: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """[T, bytes of a row]."""
    row_bytes = int(np.prod(rows.shape[1:])) * rows.dtype.itemsize
    return np.frombuffer(np.ascontiguousarray(rows).tobytes(), np.uint8).reshape(len(rows), row_bytes)
