"""Conversions between the plain records and their protobuf messages: the only place where both are known."""

from collections.abc import Sequence
from typing import Literal

from common.pb import decode_pb2
from common.pb import types_pb2 as pb
from common.sampling import FinishReason, SampledToken, SamplingParams, TokenLogprob

RoleName = Literal["prefill", "decode", "both"]

#: Roles as metrics, /cluster and flags spell them.
ROLE_NAMES: dict[pb.Role.ValueType, RoleName] = {
    pb.ROLE_PREFILL: "prefill",
    pb.ROLE_DECODE: "decode",
    pb.ROLE_BOTH: "both",
}

_FINISH_TO_PB = {
    None: pb.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORT: pb.FINISH_REASON_ABORT,
}
_FINISH_FROM_PB = {value: key for key, value in _FINISH_TO_PB.items()}


def sampling_to_pb(params: SamplingParams) -> pb.SamplingParams:
    return pb.SamplingParams(
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        seed=params.seed,
        n=params.n,
        stop_token_ids=sorted(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
        logprobs=params.logprobs,
        logit_bias=params.logit_bias,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        allowed_token_ids=sorted(params.allowed_token_ids),
        bad_words=[pb.TokenIds(ids=ids) for ids in params.bad_words],
        processed_logprobs=params.processed_logprobs,
        prompt_logprobs=params.prompt_logprobs,
        grammar=params.grammar,
        sampling_mask=params.sampling_mask,
    )


def sampling_from_pb(message: pb.SamplingParams) -> SamplingParams:
    return SamplingParams(
        max_tokens=message.max_tokens,
        min_tokens=message.min_tokens,
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        min_p=message.min_p,
        seed=message.seed,
        n=message.n,
        stop_token_ids=frozenset(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        logit_bias=dict(message.logit_bias),
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty,
        allowed_token_ids=frozenset(message.allowed_token_ids),
        bad_words=tuple(tuple(word.ids) for word in message.bad_words),
        processed_logprobs=message.processed_logprobs,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        grammar=message.grammar if message.HasField("grammar") else None,
        sampling_mask=message.sampling_mask,
    )


def token_to_pb(token: SampledToken) -> pb.SampledToken:
    own = None if token.logprob is None else _logprob_to_pb(token.logprob)
    return pb.SampledToken(
        token_id=token.token_id,
        logprob=own,
        top=[_logprob_to_pb(t) for t in token.top],
        mask=token.mask or b"",
        weight_version=token.weight_version,
    )


def token_from_pb(message: pb.SampledToken) -> SampledToken:
    own = _logprob_from_pb(message.logprob) if message.HasField("logprob") else None
    top = tuple(_logprob_from_pb(t) for t in message.top)
    # The sampled id itself always survives, so that an empty mask means: not asked for.
    return SampledToken(message.token_id, own, top, message.mask or None, message.weight_version)


def are_plain(tokens: Sequence[SampledToken]) -> bool:
    """Whether ids and one label of weights say all about them."""
    return all(
        token.logprob is None and token.mask is None and token.weight_version == tokens[0].weight_version
        for token in tokens
    )


def put_tokens(message: decode_pb2.TokenChunk, tokens: Sequence[SampledToken]) -> None:
    """Into a message that has none yet, in the shorter of its two forms that says all about them."""
    if tokens and are_plain(tokens):
        message.token_ids.extend([token.token_id for token in tokens])
        message.weight_version = tokens[0].weight_version
    else:
        message.tokens.extend([token_to_pb(token) for token in tokens])


def tokens_from_pb(message: decode_pb2.TokenChunk) -> tuple[SampledToken, ...]:
    """What `put_tokens` has put."""
    token_ids = message.token_ids[:]  # a list: protobuf's own sequence takes three times as long to walk through
    if not token_ids:
        return tuple([token_from_pb(token) for token in message.tokens])
    version = message.weight_version
    return tuple([SampledToken(token_id, None, (), None, version) for token_id in token_ids])


def _logprob_to_pb(value: TokenLogprob) -> pb.TokenLogprob:
    return pb.TokenLogprob(token_id=value.token_id, logprob=value.logprob, rank=value.rank)


def _logprob_from_pb(message: pb.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(message.token_id, message.logprob, message.rank)


def finish_to_pb(reason: FinishReason | None) -> pb.FinishReason.ValueType:
    return _FINISH_TO_PB[reason]


def finish_from_pb(reason: pb.FinishReason.ValueType) -> FinishReason | None:
    return _FINISH_FROM_PB[reason]
