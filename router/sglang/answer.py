"""Words of the SGLang dialect: whole answers, and cumulative events."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from msgspec import UNSET, UnsetType

from common.prompt_logprobs import PromptLogprobs
from common.routing.record import RoutingArray
from common.sampling import Finish, FinishReason, SampledToken, TokenLogprob
from router.answer import finite, weight_versions
from router.forms import Base64, Json, to_json
from router.job import ChoiceState, Job, Outcome, RowsMode
from router.plan import Plan
from router.rows_format import base64_of
from router.sglang.forms import SglangFinishReason, SglangMetaInfo, SglangOutput
from router.sglang.response_schemas import InputLogprobTriple, LogprobTriple
from router.stitch import Piece, token_bytes
from router.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class SglangOptions:
    """What a request says about the form of its answer."""

    #: `meta_info.id` of every choice, in order.
    ids: Sequence[str]
    #: The answer is a list.
    batch: bool
    logprobs: bool = False
    num_top: int = 0
    #: First prompt position with a logprob.
    input_start: int | None = None
    text_in_logprobs: bool = False


@dataclass(slots=True)
class _Told:
    """What a choice has said so far, in the words of its answer: events repeat it all, but make only what is new."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    own: list[LogprobTriple] = field(default_factory=list)
    top: list[list[LogprobTriple]] = field(default_factory=list)

    def add(self, piece: Piece, tokenizer: Tokenizer | None) -> "_Told":
        """With a tokenizer, logprobs show texts."""
        self.text += piece.text
        for token in piece.tokens:
            self.ids.append(token.token_id)
            if token.logprob is not None:
                self.own.append(_triple(token.logprob, tokenizer))
                self.top.append([_triple(each, tokenizer) for each in token.top])
        return self


@dataclass(frozen=True, slots=True)
class SglangDialect:
    """Answers of POST /generate to one request. Rows travel on the last event only, so `max_event_bytes` is moot."""

    options: SglangOptions
    max_event_bytes: int
    _told: dict[int, _Told] = field(default_factory=dict)

    @property
    def rows_mode(self) -> RowsMode:
        return "final"

    @property
    def is_cumulative(self) -> bool:
        return True

    def whole(self, job: Job, outcomes: Sequence[Outcome]) -> Json:
        outputs = [self._output(job, outcome.state, outcome.piece) for outcome in outcomes]
        return to_json(list(outputs) if self.options.batch else outputs[0])

    def opening(self, job: Job) -> Sequence[Json]:
        return ()

    def event(self, job: Job, state: ChoiceState, piece: Piece, *, first: bool) -> Json:
        return to_json(self._output(job, state, piece, state.index if self.options.batch else UNSET))

    def closing(self, job: Job) -> Sequence[Json]:
        return ()

    def token_bytes(self, token: SampledToken, text: str) -> int:
        return token_bytes(token, text)

    def _output(self, job: Job, state: ChoiceState, piece: Piece, index: int | UnsetType = UNSET) -> SglangOutput:
        """The choice with everything up to this piece."""
        tokenizer = job.tokenizer if self.options.text_in_logprobs else None
        told = self._told.setdefault(state.index, _Told()).add(piece, tokenizer)
        meta = self._meta(job, state, piece, told)
        if self.options.logprobs:
            meta.output_token_logprobs = told.own
            if self.options.num_top:
                meta.output_top_logprobs = told.top
        if piece.finish is not None:
            self._end(meta, job, state, piece, tokenizer)
        return SglangOutput(text=told.text, output_ids=told.ids, meta_info=meta, index=index)

    def _meta(self, job: Job, state: ChoiceState, piece: Piece, told: _Told) -> SglangMetaInfo:
        plan, spans = state.plan, state.versions.spans
        return SglangMetaInfo(
            id=self.options.ids[state.index],
            finish_reason=None if piece.finish is None else _finish_reason(piece.finish, told.ids),
            prompt_tokens=plan.prompt_len,
            completion_tokens=len(told.ids),
            cached_tokens=job.count.cached.get(plan.index, 0),
            weight_version=spans[-1][0] if spans else job.limits.weight_version,
            weight_versions=weight_versions(state.versions),
            e2e_latency=time.monotonic() - job.clock.started_at,
        )

    def _end(
        self, meta: SglangMetaInfo, job: Job, state: ChoiceState, piece: Piece, tokenizer: Tokenizer | None
    ) -> None:
        """Adds what only the last event of a choice carries, because it would be too large to repeat."""
        if self.options.logprobs:
            self._add_input_logprobs(meta, state.plan, job.prompt_logprobs(state.plan), tokenizer)
        if piece.rows is not None:
            meta.routed_experts, meta.routed_experts_start_len = flat_int32(piece.rows.array_TLK), piece.rows_start

    def _add_input_logprobs(
        self, meta: SglangMetaInfo, plan: Plan, scores: PromptLogprobs | None, tokenizer: Tokenizer | None
    ) -> None:
        """As SGLang: the first logprob is null, because its forward passes begin there."""
        start = self.options.input_start
        positions = [] if scores is None or start is None else scores[start:].tolist()
        own: list[InputLogprobTriple] = []
        top: list[list[LogprobTriple] | None] = []
        for at, ((_, logprob, _), *others) in enumerate(positions):
            token_id = plan.token_ids[(start or 0) + at]
            own.append((None if at == 0 else finite(logprob), token_id, _text(token_id, tokenizer)))
            top.append(None if at == 0 else [(finite(value), i, _text(i, tokenizer)) for i, value, _ in others])
        meta.input_token_logprobs = own
        if self.options.num_top:
            meta.input_top_logprobs = top


def flat_int32(rows_TLK: RoutingArray) -> Base64:
    """Of little-endian int32 in C order, without a header."""
    return base64_of(np.ascontiguousarray(rows_TLK, np.dtype("<i4")))


def _finish_reason(finish: Finish, token_ids: Sequence[int]) -> SglangFinishReason:
    match finish.reason:
        case FinishReason.STOP:
            # An end-of-sequence id is matched like any stop id.
            matched = token_ids[-1] if finish.stop_reason is None else finish.stop_reason
            return SglangFinishReason(type="stop", matched=matched)
        case FinishReason.LENGTH:
            return SglangFinishReason(type="length", length=len(token_ids))
        case FinishReason.ABORT:
            return SglangFinishReason(type="abort", message="Aborted")


def _triple(value: TokenLogprob, tokenizer: Tokenizer | None) -> LogprobTriple:
    return finite(value.logprob), value.token_id, _text(value.token_id, tokenizer)


def _text(token_id: int, tokenizer: Tokenizer | None) -> str | None:
    return None if tokenizer is None else tokenizer.token_text(token_id)
