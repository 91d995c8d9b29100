"""One request on its way through the router, and what a dialect is: an object that words its answers."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from common.prompt_logprobs import PromptLogprobs, from_bytes
from common.sampling import Finish, SampledToken
from router.choice import VersionSpans
from router.chunk import Chunk
from router.forms import Json, PromptTokensDetails, Usage
from router.metrics import RequestClock
from router.plan import ModelLimits, Plan
from router.stitch import Piece
from router.text.tokenizer import Tokenizer

#: Where the id of a request travels, both ways.
REQUEST_ID_HEADER = "X-Request-Id"

#: Requests of one conversation may name it here, so that they go to the same workers (`--placement session`).
SESSION_HEADER = "X-Session-Id"

#: A packed entry has 12 bytes; with its keys and the text of its id it has about 100.
JSON_BYTES_PER_SCORE_BYTE = 8

#: How rows travel in a stream.
RowsMode = Literal["delta", "final"]


@dataclass(slots=True)
class TokenCount:
    """What `usage` is made from, over all prompts and choices of a request."""

    prompt: int
    completion: int = 0
    #: Prompt tokens that were not computed, by prompt.
    cached: dict[int, int] = field(default_factory=dict)

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.prompt,
            total_tokens=self.prompt + self.completion,
            completion_tokens=self.completion,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(self.cached.values())),
        )


@dataclass(slots=True)
class Job:
    """One validated request and what all of its choices share."""

    request_id: str
    model: str
    #: Seconds since the epoch.
    created: int
    limits: ModelLimits
    plans: list[Plan]
    clock: RequestClock
    count: TokenCount
    tokenizer: Tokenizer | None
    _scores: dict[int, bytearray] = field(default_factory=dict)

    @property
    def headers(self) -> dict[str, str]:
        return {REQUEST_ID_HEADER: self.request_id}

    def note(self, plan: Plan, chunk: Chunk) -> None:
        """Keeps cache hits, prompt logprobs and the outcome up to date."""
        if chunk.num_cached_tokens:
            self.count.cached[plan.index] = chunk.num_cached_tokens
        if chunk.prompt_logprobs:
            self._scores.setdefault(plan.index, bytearray()).extend(chunk.prompt_logprobs)
        if chunk.finish:
            self.clock.finished(chunk.finish.reason)

    def prompt_logprobs(self, plan: Plan) -> PromptLogprobs | None:
        """One entry per prompt token; None if the request asked for none, or was aborted before all were there."""
        wanted = plan.sampling.prompt_logprobs
        if wanted is None:
            return None
        scores = from_bytes(bytes(self._scores.get(plan.index, b"")), wanted)
        return scores if len(scores) == plan.prompt_len else None

    def prompt_logprobs_bytes(self, plan: Plan) -> int:
        """About what they take as JSON."""
        return JSON_BYTES_PER_SCORE_BYTE * len(self._scores.get(plan.index, b""))


@dataclass(slots=True)
class ChoiceState:
    """How far a choice is; the event in hand is counted."""

    index: int
    #: Index among the choices of its prompt.
    choice: int
    plan: Plan
    versions: VersionSpans
    num_tokens: int = 0
    #: Events that this choice has sent before.
    num_events: int = 0
    #: About what all of its pieces take.
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """A choice of a whole answer, finished."""

    state: ChoiceState
    piece: Piece

    @property
    def finish(self) -> Finish:
        assert self.piece.finish is not None, "the pipeline returned without an error"
        return self.piece.finish


class Dialect(Protocol):
    """How one endpoint words what happens to one request."""

    @property
    def rows_mode(self) -> RowsMode:
        """How rows travel in this request's stream."""
        ...

    @property
    def is_cumulative(self) -> bool:
        """Whether each event of a choice repeats what the events before it have said."""
        ...

    @property
    def max_event_bytes(self) -> int:
        """Largest event of a delta stream."""
        ...

    def whole(self, job: Job, outcomes: Sequence[Outcome]) -> Json:
        """JSON of a whole answer; `outcomes` in the order of their indices. May run in a thread."""
        ...

    def opening(self, job: Job) -> Sequence[Json]:
        """Events before the first piece of any choice."""
        ...

    def event(self, job: Job, state: ChoiceState, piece: Piece, *, first: bool) -> Json | None:
        """JSON of what one piece of a choice brings; None if it says nothing to this dialect's clients.

        `first`: it is the stream's first event. May run in a thread.
        """
        ...

    def closing(self, job: Job) -> Sequence[Json]:
        """Events after the last choice has ended."""
        ...

    def token_bytes(self, token: SampledToken, text: str) -> int:
        """Upper bound of what a token takes in an event."""
        ...
