"""One choice on its way to the client: counted against the row rule, read as text, cut at a stop string. Sans-I/O."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from common.sampling import Finish, FinishReason, SampledToken
from router.chunk import Chunk
from router.plan import Plan
from router.text.detokenizer import Detokenizer
from router.text.stop import StopMatcher
from router.text.tokenizer import Tokenizer


class ReadChunk(msgspec.Struct, frozen=True, gc=False):
    """A chunk that ends where its choice does. `texts` has what each token released; empty when no text is wanted."""

    chunk: Chunk
    texts: tuple[str, ...] = ()
    #: Text that the end of the choice released.
    tail: str = ""


@dataclass(slots=True)
class VersionSpans:
    """Which weights a choice's tokens came from: (label, number of tokens), in order."""

    spans: list[tuple[str, int]] = field(default_factory=list)

    def add(self, tokens: Sequence[SampledToken], *, are_alike: bool = False) -> None:
        """The next tokens. `are_alike`: all of them are of the same weights."""
        if tokens and are_alike:
            self._extend(tokens[0].weight_version, len(tokens))
            return
        for token in tokens:
            self._extend(token.weight_version, 1)

    def _extend(self, version: str, num_tokens: int) -> None:
        if self.spans and self.spans[-1][0] == version:
            self.spans[-1] = (version, self.spans[-1][1] + num_tokens)
        else:
            self.spans.append((version, num_tokens))


class ChoiceReader:
    """Reads the chunks of one choice. `tokenizer` is needed when the plan's text options need text."""

    def __init__(self, plan: Plan, tokenizer: Tokenizer | None) -> None:
        self._detokenizer: Detokenizer | None = None
        self._prompt_only = plan.prompt_only
        self._include_stop = plan.text.stops.include
        self._matcher = StopMatcher(plan.text.stops)
        self.versions = VersionSpans()
        self.ended = False
        if plan.text.needed and not plan.prompt_only:
            assert tokenizer is not None, "the planner refuses text without a tokenizer"
            self._detokenizer = Detokenizer(tokenizer, plan.token_ids, plan.text.skip_special_tokens)

    def read(self, chunk: Chunk) -> ReadChunk:
        """The part of the chunk that belongs to the choice. Nothing may be read after the end."""
        assert not self.ended, "the choice has ended"
        if self._prompt_only:
            return self._without_tokens(chunk)
        texts, stop = ((), None) if self._detokenizer is None else self._texts(chunk, self._detokenizer)
        if stop is not None:
            chunk = chunk.cut(len(texts), Finish(FinishReason.STOP, stop_string=stop))
        self.ended = chunk.finish is not None
        self.versions.add(chunk.tokens, are_alike=chunk.is_plain)
        return ReadChunk(chunk, texts, self._tail() if self.ended and stop is None else "")

    def _tail(self) -> str:
        """What was held back, and U+FFFD for a cut character."""
        return "" if self._detokenizer is None else self._matcher.finish() + self._detokenizer.finish()

    def _texts(self, chunk: Chunk, detokenizer: Detokenizer) -> tuple[tuple[str, ...], str | None]:
        """What each token releases, up to the one that completes a stop string, and that string.

        As in vLLM, a stop or end-of-sequence id that ends the choice is no part of its text.
        """
        texts: list[str] = []
        for at, token in enumerate(chunk.tokens, start=1):
            if self._is_stop_token(chunk, at):
                texts.append("")
                break
            shown, stop = self._matcher.feed(detokenizer.feed(token.token_id))
            texts.append(shown)
            if stop is not None:
                return tuple(texts), stop
        return tuple(texts), None

    def _is_stop_token(self, chunk: Chunk, at: int) -> bool:
        """Whether the chunk's `at`-th token ended the choice, by its id, and is not to be seen."""
        ended = chunk.finish is not None and chunk.finish.reason is FinishReason.STOP
        return ended and at == len(chunk.tokens) and not self._include_stop

    def _without_tokens(self, chunk: Chunk) -> ReadChunk:
        """The one token that the prompt's logits brought is nobody's; the prompt's rows are complete with it."""
        self.ended = chunk.finish is not None
        finish = chunk.finish
        if finish is not None and finish.reason is FinishReason.STOP:
            finish = Finish(FinishReason.LENGTH)
        return ReadChunk(
            Chunk(
                rows=chunk.rows,
                num_rows=chunk.num_rows,
                finish=finish,
                num_cached_tokens=chunk.num_cached_tokens,
                choice=chunk.choice,
                prompt_logprobs=chunk.prompt_logprobs,
            )
        )
