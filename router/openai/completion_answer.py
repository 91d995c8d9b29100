"""Words of POST /v1/completions."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from common.errors import InternalError
from common.sampling import FinishReason, TokenLogprob
from router.answer import finite, masks_of, own_first, weight_versions
from router.forms import Json, to_json
from router.job import ChoiceState, Job, Outcome
from router.openai.dialect import OpenAIDialect
from router.openai.forms import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionResponse,
    CompletionStreamChoice,
    CompletionStreamResponse,
)
from router.openai.schemas import CompletionRequest
from router.openai.token_words import TokenWords
from router.stitch import Piece


@dataclass(frozen=True)
class CompletionDialect(OpenAIDialect):
    """Answers to one request. `echoes`: the prompts' texts, when the answer shows them."""

    body: CompletionRequest
    echoes: Sequence[str] | None
    #: By choice, characters of the tokens that earlier events have spelled.
    _num_spelled: dict[int, int] = field(default_factory=dict)

    def whole(self, job: Job, outcomes: Sequence[Outcome]) -> Json:
        return to_json(
            CompletionResponse(
                id=job.request_id,
                created=job.created,
                model=job.model,
                choices=[self._whole_choice(job, outcome) for outcome in outcomes],
                usage=job.count.usage(),
            )
        )

    def _whole_choice(self, job: Job, outcome: Outcome) -> CompletionChoice:
        state, piece, finish = outcome.state, outcome.piece, outcome.finish
        return CompletionChoice(
            index=state.index,
            text=self._echo(state) + piece.text,
            logprobs=self._logprobs(job, state, piece, begins=True),
            finish_reason=finish.reason,
            stop_reason=finish.stop_reason,
            token_ids=self._ids(piece.tokens),
            prompt_token_ids=self._prompt_ids(state.plan.token_ids),
            prompt_logprobs=self._entries(job.prompt_logprobs(state.plan)),
            routed_experts=self._rows(piece),
            sampling_mask=masks_of(piece.tokens),
            weight_versions=weight_versions(state.versions),
        )

    def event(self, job: Job, state: ChoiceState, piece: Piece, *, first: bool) -> Json | None:
        """The prompt is echoed with the first token, when its logprobs are there, or with the end if none came."""
        begins = state.num_tokens == len(piece.tokens) and bool(piece.tokens or piece.finish)
        if self._is_silent(state, piece) and not (begins and self.echoes):
            return None
        finish = piece.finish
        choice = CompletionStreamChoice(
            index=state.index,
            text=(self._echo(state) if begins else "") + piece.text,
            logprobs=self._logprobs(job, state, piece, begins=begins),
            finish_reason=finish.reason if finish else None,
            stop_reason=finish.stop_reason if finish else None,
            token_ids=self._ids(piece.tokens),
            prompt_token_ids=self._prompt_ids(state.plan.token_ids, due=state.num_events == 0),
            routed_experts=self._rows(piece),
            sampling_mask=masks_of(piece.tokens),
            weight_versions=weight_versions(state.versions) if finish else None,
        )
        return to_json(
            CompletionStreamResponse(
                id=job.request_id,
                created=job.created,
                model=job.model,
                choices=[choice],
                usage=self._usage_so_far(job),
            )
        )

    def closing(self, job: Job) -> Sequence[Json]:
        if not self.body.options.include_usage:
            return ()
        usage = job.count.usage()
        event = CompletionStreamResponse(
            id=job.request_id, created=job.created, model=job.model, choices=[], usage=usage
        )
        return (to_json(event),)

    def _echo(self, state: ChoiceState) -> str:
        return self.echoes[state.plan.index] if self.echoes else ""

    def _logprobs(self, job: Job, state: ChoiceState, piece: Piece, *, begins: bool) -> CompletionLogprobs | None:
        """Of its tokens, after those of an echoed prompt. None if there are none, or the request wants none."""
        if state.plan.sampling.logprobs is None:
            return None
        spelled = _Spelled(self.words, 0 if begins else self._num_spelled.get(state.index, 0))
        if begins and self.body.echo and not _came_to_nothing(piece):
            _spell_prompt(spelled, job, state)
        for token in piece.tokens:
            if token.logprob is not None:
                spelled.add(token.token_id, token.logprob, own_first(token.logprob, token.top))
        self._num_spelled[state.index] = spelled.num_chars
        return spelled.logprobs()


def _came_to_nothing(piece: Piece) -> bool:
    """Aborted before the first token: not all of the prompt may have been scored."""
    return not piece.tokens and piece.finish is not None and piece.finish.reason is FinishReason.ABORT


def _spell_prompt(spelled: "_Spelled", job: Job, state: ChoiceState) -> None:
    """Raises InternalError if a choice begins before the scores of its whole prompt are there."""
    prompt, scores = state.plan.token_ids, job.prompt_logprobs(state.plan)
    if scores is None or len(scores) != len(prompt):
        raise InternalError(f"{job.request_id}: choice {state.index} began before its prompt was scored")
    num_alternatives = state.plan.sampling.logprobs or 0
    spelled.add(prompt[0], None, ())
    for token_id, entries in zip(prompt[1:], scores[1:, : 1 + num_alternatives].tolist(), strict=True):
        own, *top = (TokenLogprob(*entry) for entry in entries)
        spelled.add(token_id, own, own_first(own, top))


class _Spelled:
    """Collects tokens as the four lists of a completion's logprobs."""

    def __init__(self, words: TokenWords, num_chars: int) -> None:
        self.num_chars = num_chars
        self._words = words
        self._tokens: list[str] = []
        self._logprobs: list[float | None] = []
        self._top: list[dict[str, float] | None] = []
        self._offsets: list[int] = []

    def add(self, token_id: int, own: TokenLogprob | None, top: Sequence[TokenLogprob]) -> None:
        """`top`: the token itself first."""
        text = self._words.text(token_id)
        self._offsets.append(self.num_chars)
        self.num_chars += len(text)
        self._tokens.append(text)
        self._logprobs.append(None if own is None else finite(own.logprob))
        self._top.append(None if own is None else self._alternatives(top))

    def _alternatives(self, top: Sequence[TokenLogprob]) -> dict[str, float]:
        alternatives: dict[str, float] = {}
        for each in top:
            alternatives.setdefault(self._words.text(each.token_id), finite(each.logprob))
        return alternatives

    def logprobs(self) -> CompletionLogprobs | None:
        if not self._tokens:
            return None
        return CompletionLogprobs(
            tokens=self._tokens,
            token_logprobs=self._logprobs,
            top_logprobs=self._top,
            text_offset=self._offsets,
        )
