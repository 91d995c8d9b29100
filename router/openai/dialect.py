"""What the answers of both OpenAI endpoints have in common."""

from collections.abc import Sequence
from dataclasses import dataclass

from common.config import RouterSettings
from common.prompt_logprobs import PromptLogprobs
from common.sampling import SampledToken
from router.answer import masks_of, prompt_logprob_entries, rows_of
from router.forms import Base64, Json, PromptLogprobEntry, RoutedExperts, Usage
from router.job import ChoiceState, Job, RowsMode
from router.openai.fields import OpenAIRequest
from router.openai.token_words import TokenWords
from router.stitch import Piece


@dataclass(frozen=True)
class OpenAIDialect:
    """Answers to one request: the parts that do not depend on the endpoint."""

    body: OpenAIRequest
    settings: RouterSettings
    words: TokenWords

    @property
    def rows_mode(self) -> RowsMode:
        """Without a wish no rows travel at all (`OpenAIRequest.sampling_with`); delta then still bounds the events."""
        return self.body.options.routed_experts or "delta"

    @property
    def is_cumulative(self) -> bool:
        return False

    @property
    def max_event_bytes(self) -> int:
        return self.body.options.max_event_bytes or self.settings.max_event_bytes

    def opening(self, job: Job) -> Sequence[Json]:
        return ()

    def token_bytes(self, token: SampledToken, text: str) -> int:
        return self.words.event_bytes(token, text)

    def _rows(self, piece: Piece) -> Base64 | RoutedExperts | None:
        return rows_of(piece, self.body.routed_experts_format or "npy")

    def _ids(self, tokens: Sequence[SampledToken]) -> list[int] | None:
        return [token.token_id for token in tokens] if self.body.return_token_ids else None

    def _prompt_ids(self, token_ids: Sequence[int], *, due: bool = True) -> list[int] | None:
        return list(token_ids) if due and self.body.return_token_ids else None

    def _usage_so_far(self, job: Job) -> Usage | None:
        return job.count.usage() if self.body.options.continuous_usage_stats else None

    def _entries(self, scores: PromptLogprobs | None) -> list[PromptLogprobEntry] | None:
        """`prompt_logprobs` of the answer, if the request asked for them; echo may have needed more alternatives."""
        wanted = self.body.prompt_logprobs
        if scores is None or wanted is None:
            return None
        asked_for = scores if wanted == -1 else PromptLogprobs(scores[:, : 1 + wanted])
        return prompt_logprob_entries(asked_for, self.words.tokenizer)

    def _is_silent(self, state: ChoiceState, piece: Piece) -> bool:
        """Whether an event would tell nothing: no text, end, rows, ids, logprobs or masks."""
        told = piece.text or piece.finish or piece.rows is not None
        if told or not piece.tokens:
            return not told
        asked = self.body.return_token_ids or state.plan.sampling.logprobs is not None
        return not asked and masks_of(piece.tokens) is None
