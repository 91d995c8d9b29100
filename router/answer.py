"""The vLLM dialect's answers: pieces of choices in, schema objects and their JSON out."""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from common.routing.codec import numpy2base64
from common.sampling import FinishReason, SampledToken, TokenLogprob
from router.response_schemas import (
    ChoiceLogprobs,
    GenerateResponse,
    GenerateResponseChoice,
    GenerateResponseStreamChoice,
    GenerateStreamResponse,
    Logprob,
    PromptTokensDetails,
    TokenLogprobs,
    Usage,
    WeightVersion,
)
from router.stitch import Piece

#: JSON has no -Infinity; this is what vLLM's clients expect in its place.
NOT_FINITE = -9999.0

#: From this size on an answer is encoded in a thread: a few milliseconds on the event loop.
THREAD_FROM_BYTES = 512 * 1024


@dataclass(slots=True)
class TokenCount:
    """What `usage` is made from, over all choices of a request."""

    prompt: int
    completion: int = 0
    cached: int = 0

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.prompt,
            total_tokens=self.prompt + self.completion,
            completion_tokens=self.completion,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=self.cached),
            completion_tokens_details=None,
        )


async def encoded(num_bytes: int, encode: Callable[[], bytes]) -> bytes:
    """Runs `encode`, off the event loop when about so many bytes make that worth it."""
    return encode() if num_bytes < THREAD_FROM_BYTES else await asyncio.to_thread(encode)


def whole_answer(
    request_id: str,
    model: str,
    count: TokenCount,
    weight_version: str,
    choices: Sequence[Piece],
    prompt_token_ids: list[int] | None,
) -> bytes:
    """JSON of a non-streaming answer; `choices` in the order of their indices."""
    return _to_json(
        GenerateResponse(
            request_id=request_id,
            model=model,
            created=int(time.time()),
            usage=count.usage(),
            prompt_logprobs=None,
            prompt_token_ids=prompt_token_ids,
            choices=[_whole_choice(index, piece, weight_version) for index, piece in enumerate(choices)],
        )
    )


def _whole_choice(index: int, piece: Piece, weight_version: str) -> GenerateResponseChoice:
    assert piece.finish is not None, "the pipeline returned without an error"
    return GenerateResponseChoice(
        index=index,
        token_ids=[token.token_id for token in piece.tokens],
        finish_reason=piece.finish.reason,
        stop_reason=piece.finish.stop_token_id,
        logprobs=_logprobs(piece.tokens),
        routed_experts=_routed_experts(piece),
        sampling_mask=None,
        weight_versions=_weight_versions(weight_version, len(piece.tokens)),
    )


def stream_choice(index: int, piece: Piece, num_tokens: int, weight_version: str) -> GenerateResponseStreamChoice:
    """One choice of an event; `num_tokens` counts the choice's tokens, this event's included."""
    finish = piece.finish
    return GenerateResponseStreamChoice(
        index=index,
        token_ids=[token.token_id for token in piece.tokens],
        finish_reason=finish.reason if finish else None,
        stop_reason=finish.stop_token_id if finish else None,
        logprobs=_logprobs(piece.tokens),
        routed_experts=_routed_experts(piece),
        sampling_mask=None,
        weight_versions=_weight_versions(weight_version, num_tokens) if finish else None,
    )


def stream_event(
    request_id: str,
    choices: list[GenerateResponseStreamChoice],
    usage: Usage | None = None,
    prompt_token_ids: list[int] | None = None,
) -> bytes:
    """JSON of one event."""
    return _to_json(
        GenerateStreamResponse(request_id=request_id, usage=usage, prompt_token_ids=prompt_token_ids, choices=choices)
    )


def envelope_bytes(request_id: str, weight_version: str) -> int:
    """Upper bound of what an event takes beside its tokens and rows: every optional part is there and long."""
    long = 2**32 - 1
    choice = GenerateResponseStreamChoice(
        index=long,
        token_ids=[],
        finish_reason=FinishReason.LENGTH,
        stop_reason=long,
        logprobs=ChoiceLogprobs(content=[]),
        routed_experts="",
        sampling_mask=None,
        weight_versions=_weight_versions(weight_version, long),
    )
    return len(stream_event(request_id, [choice], TokenCount(long, long, long).usage()))


def _routed_experts(piece: Piece) -> str | None:
    rows_TLK = piece.rows_TLK
    return None if rows_TLK is None else numpy2base64(rows_TLK)


def _weight_versions(label: str, num_tokens: int) -> list[WeightVersion]:
    return [WeightVersion(version=label, start=0, end=num_tokens)] if num_tokens else []


def _logprobs(tokens: Sequence[SampledToken]) -> ChoiceLogprobs | None:
    """None when the request asked for none, and for an event without tokens."""
    content = [_token_logprobs(token.logprob, token.top) for token in tokens if token.logprob is not None]
    return ChoiceLogprobs(content=content) if content else None


def _token_logprobs(own: TokenLogprob, top: Sequence[TokenLogprob]) -> TokenLogprobs:
    others = [other for other in top if other.token_id != own.token_id]
    return TokenLogprobs(
        token_id=own.token_id,
        logprob=_finite(own.logprob),
        rank=own.rank,
        top_logprobs=[
            Logprob(token_id=each.token_id, logprob=_finite(each.logprob), rank=each.rank) for each in (own, *others)
        ],
    )


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else NOT_FINITE


def _to_json(answer: GenerateResponse | GenerateStreamResponse) -> bytes:
    return answer.model_dump_json().encode()
