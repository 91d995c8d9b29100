"""Words of POST /v1/chat/completions."""

from collections.abc import Sequence
from dataclasses import dataclass

from common.sampling import SampledToken, TokenLogprob
from router.answer import finite, masks_of, weight_versions
from router.forms import Json, to_json
from router.job import ChoiceState, Job, Outcome
from router.openai.dialect import OpenAIDialect
from router.openai.forms import (
    AssistantMessage,
    ChatChoice,
    ChatCompletionChunk,
    ChatCompletionResponse,
    ChatLogprob,
    ChatLogprobs,
    ChatStreamChoice,
    ChatTokenLogprobs,
    Delta,
    FirstDelta,
)
from router.openai.schemas import ChatCompletionRequest
from router.stitch import Piece


@dataclass(frozen=True)
class ChatDialect(OpenAIDialect):
    """Answers to one request. `prefix`: text that goes in front of every answer, because echo asked for it."""

    body: ChatCompletionRequest
    prefix: str

    def whole(self, job: Job, outcomes: Sequence[Outcome]) -> Json:
        (plan,) = job.plans
        return to_json(
            ChatCompletionResponse(
                id=job.request_id,
                created=job.created,
                model=job.model,
                choices=[self._whole_choice(outcome) for outcome in outcomes],
                usage=job.count.usage(),
                prompt_logprobs=self._entries(job.prompt_logprobs(plan)),
                prompt_token_ids=self._prompt_ids(plan.token_ids),
            )
        )

    def _whole_choice(self, outcome: Outcome) -> ChatChoice:
        piece, finish = outcome.piece, outcome.finish
        return ChatChoice(
            index=outcome.state.index,
            message=AssistantMessage(content=self.prefix + piece.text),
            logprobs=self._logprobs(piece.tokens),
            finish_reason=finish.reason,
            stop_reason=finish.stop_reason,
            token_ids=self._ids(piece.tokens),
            routed_experts=self._rows(piece),
            sampling_mask=masks_of(piece.tokens),
            weight_versions=weight_versions(outcome.state.versions),
        )

    def opening(self, job: Job) -> Sequence[Json]:
        """One event per choice that names the role, in the order of the choices.

        The official client's accumulator relies on both: it counts the logprobs of an event twice that begins a choice
        other than the first, and takes choices for those in whose order they begin. What echo and `return_token_ids`
        bring is here too, whatever its size.
        """
        (plan,) = job.plans
        choices = [
            ChatStreamChoice(
                index=plan.choice_index(choice),
                delta=FirstDelta(content=self.prefix),
                logprobs=None,
                finish_reason=None,
                stop_reason=None,
                token_ids=None,
                routed_experts=None,
                sampling_mask=None,
                weight_versions=None,
            )
            for choice in range(plan.sampling.n)
        ]
        prompt = self._prompt_ids(plan.token_ids)
        return [self._chunk(job, choice, None if choice.index else prompt) for choice in choices]

    def event(self, job: Job, state: ChoiceState, piece: Piece, *, first: bool) -> Json | None:
        if self._is_silent(state, piece):
            return None
        finish = piece.finish
        choice = ChatStreamChoice(
            index=state.index,
            delta=Delta(content=piece.text),
            logprobs=self._logprobs(piece.tokens),
            finish_reason=finish.reason if finish else None,
            stop_reason=finish.stop_reason if finish else None,
            token_ids=self._ids(piece.tokens),
            routed_experts=self._rows(piece),
            sampling_mask=masks_of(piece.tokens),
            weight_versions=weight_versions(state.versions) if finish else None,
        )
        return self._chunk(job, choice)

    def _chunk(self, job: Job, choice: ChatStreamChoice, prompt_token_ids: list[int] | None = None) -> Json:
        return to_json(
            ChatCompletionChunk(
                id=job.request_id,
                created=job.created,
                model=job.model,
                choices=[choice],
                usage=self._usage_so_far(job),
                prompt_token_ids=prompt_token_ids,
            )
        )

    def closing(self, job: Job) -> Sequence[Json]:
        if not self.body.options.include_usage:
            return ()
        event = ChatCompletionChunk(
            id=job.request_id,
            created=job.created,
            model=job.model,
            choices=[],
            usage=job.count.usage(),
            prompt_token_ids=None,
        )
        return (to_json(event),)

    def _logprobs(self, tokens: Sequence[SampledToken]) -> ChatLogprobs | None:
        """None when the request asked for none, and for an event without tokens."""
        content = [self._token(token.logprob, token.top) for token in tokens if token.logprob is not None]
        return ChatLogprobs(content=content) if content else None

    def _token(self, own: TokenLogprob, top: Sequence[TokenLogprob]) -> ChatTokenLogprobs:
        return ChatTokenLogprobs(
            token=self.words.text(own.token_id),
            logprob=finite(own.logprob),
            bytes=self.words.bytes(own.token_id),
            top_logprobs=[self._alternative(each) for each in top],
        )

    def _alternative(self, each: TokenLogprob) -> ChatLogprob:
        return ChatLogprob(
            token=self.words.text(each.token_id), logprob=finite(each.logprob), bytes=self.words.bytes(each.token_id)
        )
