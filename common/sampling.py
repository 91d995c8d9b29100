"""How one choice is sampled and what a generated token looks like: plain records, shared by router and workers."""

from dataclasses import dataclass, field
from enum import StrEnum

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


class FinishReason(StrEnum):
    """Why a choice ended; the values are the wire strings of the HTTP API."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Validated by the router; the engine trusts it. Field meanings: proto/types.proto."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    choice: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    logprobs: int | None = None
    logit_bias: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """fp32 log-softmax of the raw logits at one id; rank 1 is the most likely."""

    token_id: int
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One generated token; `logprob` is None and `top` empty when the request asked for no logprobs."""

    token_id: int
    logprob: TokenLogprob | None = None
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Finish:
    """How a choice ended; `stop_token_id` is set when one of `stop_token_ids` ended it."""

    reason: FinishReason
    stop_token_id: int | None = None


def finish_after(
    params: SamplingParams, eos_token_ids: frozenset[int], token_id: int, num_generated: int
) -> Finish | None:
    """Whether the `num_generated`-th token (1-based) ends the choice: the one rule that P and D share."""
    if num_generated >= params.min_tokens:
        if token_id in params.stop_token_ids:
            return Finish(FinishReason.STOP, token_id)
        if token_id in eos_token_ids and not params.ignore_eos:
            return Finish(FinishReason.STOP)
    if num_generated >= params.max_tokens:
        return Finish(FinishReason.LENGTH)
    return None
