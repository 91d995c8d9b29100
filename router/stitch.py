"""Puts the chunks of one choice together: into events of bounded size (delta), or into one whole (final, no stream).

Sans-I/O. The rule both sides of the router keep: once a choice has g >= 1 tokens, it has p - start + g - 1 rows.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat

import msgspec

from common.errors import RoutingMissingError
from common.routing.record import RoutingArray, RoutingLayout
from common.sampling import Finish, FinishReason, SampledToken
from router.choice import ReadChunk
from router.plan import Plan
from router.rows import Rows

#: Bytes before the data in an .npy file of a routing array.
NPY_HEADER_BYTES = 128

#: JSON may write a character as \\uXXXX\\uXXXX.
MAX_JSON_BYTES_PER_CHARACTER = 12

#: A token's id, which has at most 10 characters, and what stands around it.
PLAIN_TOKEN_BYTES = 13

#: Upper bound of what a token and the text it released take in an event's JSON.
TokenCost = Callable[[SampledToken, str], int]


class Piece(msgspec.Struct, frozen=True, gc=False):
    """What one event says about one choice. `rows` is None when it carries no array."""

    tokens: tuple[SampledToken, ...] = ()
    rows: Rows | None = None
    #: Position of the first row.
    rows_start: int = 0
    finish: Finish | None = None
    text: str = ""
    #: About what the event will take.
    num_bytes: int = 0
    #: No token has logprobs or a mask; False says nothing.
    is_plain: bool = False

    @property
    def rows_TLK(self) -> RoutingArray | None:
        return None if self.rows is None else self.rows.array_TLK


def _num_bytes(rows: Rows | None, tokens: Sequence[SampledToken]) -> int:
    return (0 if rows is None else rows.num_bytes) + sum(token_bytes(token, "") for token in tokens)


class RowLedger:
    """Counts tokens and rows of one choice and refuses any chunk that breaks the rule."""

    def __init__(self, plan: Plan, layout: RoutingLayout) -> None:
        self.enabled = plan.routing_start is not None
        self._plan = plan
        self._row_bytes = layout.row_bytes
        self.start = plan.routing_start or 0
        self.num_prompt_rows = plan.prompt_len - self.start
        self.num_tokens = 0
        self.num_rows = 0
        self._finish: Finish | None = None

    def add(self, read: ReadChunk) -> None:
        """Raises RoutingMissingError if a row is missing, there is one too many, or they have another size."""
        chunk = read.chunk
        self.num_tokens += len(chunk.tokens)
        self.num_rows += chunk.num_rows
        self._finish = chunk.finish
        if not self._complete():
            raise RoutingMissingError(
                f"{self._plan.request_id}: {self.num_rows} routing rows after {self.num_tokens} tokens of a prompt of "
                f"{self._plan.prompt_len} from {self._plan.routing_start}"
            )
        if len(chunk.rows) != chunk.num_rows * self._row_bytes:
            raise RoutingMissingError(
                f"{self._plan.request_id}: {len(chunk.rows)} bytes of routing rows where {chunk.num_rows} rows need "
                f"{chunk.num_rows * self._row_bytes}"
            )

    def _complete(self) -> bool:
        if not self.enabled:
            return self.num_rows == 0
        if self._prompt_is_done_alone():
            return self.num_rows == self.num_prompt_rows
        if self.num_tokens == 0:
            return self.num_rows <= self.num_prompt_rows
        return self.num_rows == self.num_prompt_rows + self.num_tokens - 1

    @property
    def void(self) -> bool:
        """No array is owed: routing is off, or the choice ended before its prompt was computed."""
        return not self.enabled or (self.num_tokens == 0 and not self._prompt_is_done_alone())

    def _prompt_is_done_alone(self) -> bool:
        """The request wanted the prompt only, and has it."""
        return self._plan.prompt_only and self._finish is not None and self._finish.reason is not FinishReason.ABORT


class Whole:
    """Collects a choice: the non-streaming answer, and the rows of a "final" stream."""

    def __init__(self, plan: Plan, layout: RoutingLayout) -> None:
        self._ledger = RowLedger(plan, layout)
        self._layout = layout
        self._rows: list[bytes] = []
        self._texts: list[str] = []
        self.tokens: list[SampledToken] = []
        self.finish: Finish | None = None

    def feed(self, read: ReadChunk) -> None:
        self._ledger.add(read)
        self._rows.append(read.chunk.rows)
        self.tokens.extend(read.chunk.tokens)
        self._texts += (*read.texts, read.tail)
        self.finish = read.chunk.finish

    def rows(self) -> Rows | None:
        """All rows so far; None when none are owed."""
        return None if self._ledger.void else Rows(self._layout, self._ledger.num_rows, tuple(self._rows))

    def piece(self) -> Piece:
        """Everything so far."""
        rows, text = self.rows(), "".join(self._texts)
        num_bytes = _num_bytes(rows, self.tokens)
        return Piece(tuple(self.tokens), rows, self._ledger.start, self.finish, text, num_bytes)


class FinalStitcher:
    """Events of a "final" stream: tokens as they come, every row on the last event."""

    def __init__(self, plan: Plan, layout: RoutingLayout) -> None:
        self._whole = Whole(plan, layout)
        self._start = plan.routing_start or 0

    def feed(self, read: ReadChunk) -> Sequence[Piece]:
        self._whole.feed(read)
        chunk = read.chunk
        if not chunk.tokens and not chunk.finish:
            return ()
        rows = self._whole.rows() if chunk.finish else None
        text, num_bytes = "".join((*read.texts, read.tail)), _num_bytes(rows, chunk.tokens)
        return (Piece(chunk.tokens, rows, self._start, chunk.finish, text, num_bytes),)


@dataclass(slots=True)
class _Draft:
    """The event being filled: some tokens and the half-open range of the chunk's rows that goes with them."""

    first_row: int
    end_row: int
    tokens: list[SampledToken] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    token_bytes: int = 0

    @property
    def empty(self) -> bool:
        return not self.tokens and self.first_row == self.end_row


class DeltaStitcher:
    """Events of a "delta" stream: rows travel with their tokens, cut so that no event outgrows its budget.

    Args:
        budget_bytes: what tokens and rows of one event may take, JSON and base64 included. One row or one token is sent
            whatever its size.
        first_budget_bytes: the same for the choice's first event.
        token_cost: what a token takes in the dialect's events; no more than `token_bytes` if it has no logprobs.
    """

    def __init__(
        self,
        plan: Plan,
        layout: RoutingLayout,
        budget_bytes: int,
        first_budget_bytes: int,
        token_cost: TokenCost,
    ) -> None:
        self._ledger = RowLedger(plan, layout)
        self._layout = layout
        self._row_bytes = layout.row_bytes
        self._budget = first_budget_bytes
        self._later_budget = budget_bytes
        self._token_cost = token_cost
        self._sent_array = False

    def feed(self, read: ReadChunk) -> Sequence[Piece]:
        """The chunk as events, in order; each keeps the rule of the module's docstring."""
        tokens_before, rows_before = self._ledger.num_tokens, self._ledger.num_rows
        self._ledger.add(read)
        rows_start = self._ledger.start + rows_before
        uncut = self._uncut(read, rows_start)
        if uncut is not None:
            return (uncut,)
        rows, pieces = memoryview(read.chunk.rows), []
        drafts = list(self._cut(read, tokens_before))
        for at, draft in enumerate(drafts):
            last = at == len(drafts) - 1
            finish = read.chunk.finish if last else None
            part = rows[draft.first_row * self._row_bytes : draft.end_row * self._row_bytes]
            piece = Piece(
                tokens=tuple(draft.tokens),
                rows=self._rows(part, draft.end_row - draft.first_row, finish),
                rows_start=rows_start + draft.first_row,
                finish=finish,
                text="".join(draft.texts) + (read.tail if last else ""),
                num_bytes=draft.token_bytes + len(part),
            )
            pieces.append(piece)
        return pieces

    def _uncut(self, read: ReadChunk, rows_start: int) -> Piece | None:
        """The chunk as one event, if it fits: what `_cut` would find as well, token by token."""
        chunk, token_bytes = read.chunk, self._num_token_bytes(read)
        if token_bytes + base64_bytes(len(chunk.rows)) > self._budget:
            return None
        if not chunk.tokens and not chunk.rows and not chunk.finish:
            return None
        self._budget = self._later_budget
        return Piece(
            tokens=chunk.tokens,
            rows=self._rows(chunk.rows, chunk.num_rows, chunk.finish),
            rows_start=rows_start,
            finish=chunk.finish,
            text="".join(read.texts) + read.tail,
            num_bytes=token_bytes + len(chunk.rows),
            is_plain=chunk.is_plain,
        )

    def _num_token_bytes(self, read: ReadChunk) -> int:
        """Upper bound, with the texts."""
        if read.chunk.is_plain:
            num_characters = sum(map(len, read.texts))
            return PLAIN_TOKEN_BYTES * len(read.chunk.tokens) + MAX_JSON_BYTES_PER_CHARACTER * num_characters
        return sum(map(self._token_cost, read.chunk.tokens, read.texts or repeat("")))

    def _cut(self, read: ReadChunk, tokens_before: int) -> Iterator[_Draft]:
        chunk = read.chunk
        lead = self._num_lead_rows(read, tokens_before)
        draft = _Draft(0, 0)
        while draft.end_row < lead:
            draft.end_row += min(lead - draft.end_row, self._num_rows_that_fit())
            if draft.end_row < lead:
                yield from self._closed(draft)
                draft = _Draft(draft.end_row, draft.end_row)
        texts = read.texts or ("",) * len(chunk.tokens)
        for at, (token, text) in enumerate(zip(chunk.tokens, texts, strict=True)):
            num_rows = 1 if tokens_before + at > 0 and self._ledger.enabled else 0
            cost = self._token_cost(token, text)
            if not draft.empty and self._size(draft, num_rows, cost) > self._budget:
                yield from self._closed(draft)
                draft = _Draft(draft.end_row, draft.end_row)
            draft.tokens.append(token)
            draft.texts.append(text)
            draft.token_bytes += cost
            draft.end_row += num_rows
        if not draft.empty or chunk.finish:
            yield from self._closed(draft)

    def _closed(self, draft: _Draft) -> Iterator[_Draft]:
        yield draft
        self._budget = self._later_budget

    def _num_lead_rows(self, read: ReadChunk, tokens_before: int) -> int:
        """Rows of the chunk that belong to the prompt and therefore go before (or with) its first token."""
        num_tokens, num_rows = len(read.chunk.tokens), read.chunk.num_rows
        if not num_tokens:
            return num_rows
        if tokens_before or not self._ledger.enabled:
            return 0
        return num_rows - (num_tokens - 1)

    def _num_rows_that_fit(self) -> int:
        return max(1, (self._budget // 4 * 3 - NPY_HEADER_BYTES) // self._row_bytes)

    def _size(self, draft: _Draft, num_more_rows: int, more_token_bytes: int) -> int:
        num_rows = draft.end_row - draft.first_row + num_more_rows
        return draft.token_bytes + more_token_bytes + base64_bytes(num_rows * self._row_bytes)

    def _rows(self, part: bytes | memoryview, num_rows: int, finish: Finish | None) -> Rows | None:
        owed_empty = finish is not None and not self._sent_array and not self._ledger.void
        if not self._ledger.enabled or (num_rows == 0 and not owed_empty):
            return None
        self._sent_array = True
        return Rows(self._layout, num_rows, (part,))


Stitcher = DeltaStitcher | FinalStitcher


def base64_bytes(num_bytes: int) -> int:
    """Length of the base64 of an .npy file with that much data; 0 for no rows, because none is sent then."""
    return (NPY_HEADER_BYTES + num_bytes + 2) // 3 * 4 if num_bytes else 0


def token_bytes(token: SampledToken, text: str) -> int:
    """Upper bound of what a token takes in an event's JSON: id, mask and text, and its logprobs if there are any.

    A float takes at most 24 characters; the rest is keys, brackets and commas.
    """
    size = PLAIN_TOKEN_BYTES + MAX_JSON_BYTES_PER_CHARACTER * len(text) + 11 * len(token.mask or b"") // 4
    return size if token.logprob is None else size + 128 + 96 * (1 + len(token.top))
