"""Words of the vLLM dialect, tokens out: GenerateResponse and the events of its stream."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from common.config import RouterSettings
from common.id_mask import unpack_ids
from common.prompt_logprobs import PromptLogprobs
from common.sampling import SampledToken, TokenLogprob
from router.choice import VersionSpans
from router.forms import (
    Base64,
    ChoiceLogprobs,
    GenerateResponse,
    GenerateResponseChoice,
    GenerateResponseStreamChoice,
    GenerateStreamResponse,
    Json,
    Logprob,
    PromptLogprob,
    PromptLogprobEntry,
    RoutedExperts,
    TokenLogprobs,
    WeightVersion,
    to_json,
)
from router.job import ChoiceState, Job, Outcome, RowsMode
from router.plain_events import PlainEvents
from router.request_schemas import GenerateRequest, StreamOptions
from router.rows_format import RowsForm, format_rows
from router.stitch import Piece, token_bytes
from router.text.tokenizer import Tokenizer

_NO_OPTIONS = StreamOptions()

#: JSON has no -Infinity; this is what vLLM's clients expect in its place.
NOT_FINITE = -9999.0


@dataclass(frozen=True, slots=True)
class GenerateDialect:
    """Answers of POST /inference/v1/generate to one request."""

    body: GenerateRequest
    settings: RouterSettings
    rows_form: RowsForm
    #: By index of the choice.
    _plain_events: dict[int, PlainEvents] = field(default_factory=dict)

    @property
    def _options(self) -> StreamOptions:
        return self.body.stream_options or _NO_OPTIONS

    @property
    def rows_mode(self) -> RowsMode:
        return self._options.routed_experts or self.settings.stream_routed_experts

    @property
    def is_cumulative(self) -> bool:
        return False

    @property
    def max_event_bytes(self) -> int:
        return self._options.max_event_bytes or self.settings.max_event_bytes

    def whole(self, job: Job, outcomes: Sequence[Outcome]) -> Json:
        scores = job.prompt_logprobs(job.plans[0])
        return to_json(
            GenerateResponse(
                request_id=job.request_id,
                model=job.model,
                created=job.created,
                usage=job.count.usage(),
                prompt_logprobs=None if scores is None else prompt_logprob_entries(scores),
                prompt_token_ids=self.body.token_ids if self.body.return_token_ids else None,
                choices=[self._whole_choice(outcome) for outcome in outcomes],
            )
        )

    def _whole_choice(self, outcome: Outcome) -> GenerateResponseChoice:
        piece, finish = outcome.piece, outcome.finish
        return GenerateResponseChoice(
            index=outcome.state.index,
            token_ids=[token.token_id for token in piece.tokens],
            finish_reason=finish.reason,
            stop_reason=finish.stop_reason,
            logprobs=_logprobs(piece.tokens),
            routed_experts=rows_of(piece, self.rows_form),
            sampling_mask=masks_of(piece.tokens),
            weight_versions=weight_versions(outcome.state.versions),
        )

    def opening(self, job: Job) -> Sequence[Json]:
        return ()

    def event(self, job: Job, state: ChoiceState, piece: Piece, *, first: bool) -> Json:
        token_ids, rows = [token.token_id for token in piece.tokens], rows_of(piece, self.rows_form)
        if self._is_plain(piece, first=first) and (rows is None or isinstance(rows, str)):
            return self._plain(job, state).event(token_ids, rows)
        finish = piece.finish
        choice = GenerateResponseStreamChoice(
            index=state.index,
            token_ids=token_ids,
            finish_reason=finish.reason if finish else None,
            stop_reason=finish.stop_reason if finish else None,
            logprobs=_logprobs(piece.tokens),
            routed_experts=rows,
            sampling_mask=masks_of(piece.tokens),
            weight_versions=weight_versions(state.versions) if finish else None,
        )
        return self._event(job, choice, first=first)

    def _event(self, job: Job, choice: GenerateResponseStreamChoice, *, first: bool) -> Json:
        return to_json(
            GenerateStreamResponse(
                request_id=job.request_id,
                usage=job.count.usage() if self._options.continuous_usage_stats else None,
                prompt_token_ids=self.body.token_ids if first and self.body.return_token_ids else None,
                choices=[choice],
            )
        )

    def _is_plain(self, piece: Piece, *, first: bool) -> bool:
        """Whether the event brings ids and rows and nothing else."""
        return piece.is_plain and piece.finish is None and not (first or self._options.continuous_usage_stats)

    def _plain(self, job: Job, state: ChoiceState) -> PlainEvents:
        """Of one choice; made when its first such event is due."""
        known = self._plain_events.get(state.index)
        if known is not None:
            return known

        def word(token_ids: list[int], rows: str | None) -> Json:
            choice = GenerateResponseStreamChoice(
                index=state.index,
                token_ids=token_ids,
                finish_reason=None,
                stop_reason=None,
                logprobs=None,
                routed_experts=rows,
                sampling_mask=None,
                weight_versions=None,
            )
            return self._event(job, choice, first=False)

        return self._plain_events.setdefault(state.index, PlainEvents(word))

    def closing(self, job: Job) -> Sequence[Json]:
        if not self._options.include_usage:
            return ()
        usage = job.count.usage()
        event = GenerateStreamResponse(request_id=job.request_id, usage=usage, prompt_token_ids=None, choices=[])
        return (to_json(event),)

    def token_bytes(self, token: SampledToken, text: str) -> int:
        return token_bytes(token, "")


def rows_of(piece: Piece, form: RowsForm) -> Base64 | RoutedExperts | None:
    """The piece's rows in the given form, null if it carries none."""
    return None if piece.rows is None else format_rows(piece.rows, piece.rows_start, form)


def masks_of(tokens: Sequence[SampledToken]) -> list[list[int]] | None:
    """Null when the request asked for none, and for an event without tokens."""
    masks = [unpack_ids(token.mask) for token in tokens if token.mask is not None]
    return masks or None


def weight_versions(versions: VersionSpans) -> list[WeightVersion]:
    """Where the choice's tokens came from, empty for a choice without tokens."""
    spans, start = [], 0
    for version, num_tokens in versions.spans:
        spans.append(WeightVersion(version=version, start=start, end=start + num_tokens))
        start += num_tokens
    return spans


def _logprobs(tokens: Sequence[SampledToken]) -> ChoiceLogprobs | None:
    """None when the request asked for none, and for an event without tokens."""
    content = [_token_logprobs(token.logprob, token.top) for token in tokens if token.logprob is not None]
    return ChoiceLogprobs(content=content) if content else None


def _token_logprobs(own: TokenLogprob, top: Sequence[TokenLogprob]) -> TokenLogprobs:
    return TokenLogprobs(
        token_id=own.token_id,
        logprob=finite(own.logprob),
        rank=own.rank,
        top_logprobs=[
            Logprob(token_id=each.token_id, logprob=finite(each.logprob), rank=each.rank)
            for each in own_first(own, top)
        ],
    )


def own_first(own: TokenLogprob, top: Sequence[TokenLogprob]) -> list[TokenLogprob]:
    """The sampled token, then the alternatives without it."""
    return [own, *(other for other in top if other.token_id != own.token_id)]


def prompt_logprob_entries(scores: PromptLogprobs, tokenizer: Tokenizer | None = None) -> list[PromptLogprobEntry]:
    """vLLM's form of prompt logprobs; texts of ids only with a tokenizer."""
    entries: list[PromptLogprobEntry] = [None]
    for position in scores[1:].tolist():
        entry: dict[str, PromptLogprob] = {}
        for token_id, logprob, rank in position:
            text = None if tokenizer is None else tokenizer.token_text(token_id)
            entry.setdefault(str(token_id), PromptLogprob(logprob=finite(logprob), rank=rank, decoded_token=text))
        entries.append(entry)
    return entries


def finite(logprob: float) -> float:
    """What JSON can say of a logprob."""
    return logprob if math.isfinite(logprob) else NOT_FINITE
