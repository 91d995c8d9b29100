"""How a request is sampled and what a generated token looks like: plain records, shared by router and workers."""

from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


class FinishReason(StrEnum):
    """Why a choice ended; the values are the wire strings of the HTTP API."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How all choices of one prompt are sampled. Validated by the router. Field meanings: proto/types.proto."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    n: int = 1
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    logprobs: int | None = None
    logit_bias: dict[int, float] = field(default_factory=dict)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    #: Empty: all ids.
    allowed_token_ids: frozenset[int] = frozenset()
    bad_words: tuple[tuple[int, ...], ...] = ()
    processed_logprobs: bool = False
    prompt_logprobs: int | None = None
    #: llguidance's JSON form of a grammar.
    grammar: str | None = None
    sampling_mask: bool = False


class TokenLogprob(msgspec.Struct, frozen=True, gc=False):
    """fp32 log-softmax at one id, of the raw logits unless the request asks for processed ones; rank 1 is the best."""

    token_id: int
    logprob: float
    rank: int


class SampledToken(msgspec.Struct, frozen=True, gc=False):
    """One generated token; `logprob` is None and `top` empty when the request asked for no logprobs.

    `mask`: the ids that survived top-k, top-p and min-p, ascending, as `common.id_mask` packs them; None unless the
    request asked for them.
    """

    token_id: int
    logprob: TokenLogprob | None = None
    top: tuple[TokenLogprob, ...] = ()
    mask: bytes | None = None
    #: Label of the weights whose forward pass the token was sampled from.
    weight_version: str = ""


@dataclass(frozen=True, slots=True)
class Finish:
    """How a choice ended; `stop_token_id` is set when one of `stop_token_ids` ended it, `stop_string` when text did."""

    reason: FinishReason
    stop_token_id: int | None = None
    #: Found by the router, which alone knows text.
    stop_string: str | None = None

    @property
    def stop_reason(self) -> int | str | None:
        """What ended a choice beside the end-of-sequence ids, as the API's `stop_reason`."""
        return self.stop_token_id if self.stop_string is None else self.stop_string


def finish_after(
    params: SamplingParams, eos_token_ids: frozenset[int], token_id: int, num_generated: int
) -> Finish | None:
    """Whether the `num_generated`-th token (1-based) ends the choice: the one rule that P and D share."""
    if num_generated >= params.min_tokens:
        # In vLLM's order: an end-of-sequence id has no stop reason, even if it is a stop id as well.
        if token_id in eos_token_ids and not params.ignore_eos:
            return Finish(FinishReason.STOP)
        if token_id in params.stop_token_ids:
            return Finish(FinishReason.STOP, token_id)
    if num_generated >= params.max_tokens:
        return Finish(FinishReason.LENGTH)
    return None
