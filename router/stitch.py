"""Puts the chunks of one choice together: into events of bounded size (delta), or into one whole (final, no stream).

Sans-I/O. The rule both sides of the router keep: once a choice has g >= 1 tokens, it has p - start + g - 1 rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from common.errors import RoutingMissingError
from common.routing.record import RoutingArray, RoutingLayout
from common.sampling import Finish, SampledToken
from router.chunk import Chunk
from router.validate import ChoicePlan

#: Bytes before the data in an .npy file of a routing array.
NPY_HEADER_BYTES = 128


@dataclass(frozen=True, slots=True)
class Piece:
    """What one event says about one choice. `rows` are the parts of its array, None when it carries none."""

    tokens: tuple[SampledToken, ...] = ()
    rows: tuple[RoutingArray, ...] | None = None
    finish: Finish | None = None

    @property
    def rows_TLK(self) -> RoutingArray | None:
        """The array of the event; joined anew each time, because all rows of a choice may take a while."""
        return None if self.rows is None else np.concatenate(self.rows)

    @property
    def num_bytes(self) -> int:
        """About what the event will take."""
        return sum(part.nbytes for part in self.rows or ()) + sum(map(token_bytes, self.tokens))


class RowLedger:
    """Counts tokens and rows of one choice and refuses any chunk that breaks the rule."""

    def __init__(self, plan: ChoicePlan, layout: RoutingLayout) -> None:
        self.enabled = plan.routing_start is not None
        self._plan = plan
        self._layout = layout
        self.num_prompt_rows = plan.prompt_len - (plan.routing_start or 0)
        self.num_tokens = 0
        self.num_rows = 0

    def add(self, chunk: Chunk) -> RoutingArray:
        """Views the chunk's rows as [num_rows, L, K].

        Raises:
            RoutingMissingError: a row is missing, or there is one too many.
        """
        self.num_tokens += len(chunk.tokens)
        self.num_rows += chunk.num_rows
        if not self._complete():
            raise RoutingMissingError(
                f"{self._plan.request_id}: {self.num_rows} routing rows after {self.num_tokens} tokens of a prompt of "
                f"{self._plan.prompt_len} from {self._plan.routing_start}"
            )
        try:
            return self._layout.from_bytes(chunk.rows, chunk.num_rows)
        except ValueError as error:
            raise RoutingMissingError(f"{self._plan.request_id}: {error}") from error

    def _complete(self) -> bool:
        if not self.enabled:
            return self.num_rows == 0
        if self.num_tokens == 0:
            return self.num_rows <= self.num_prompt_rows
        return self.num_rows == self.num_prompt_rows + self.num_tokens - 1


class Whole:
    """Collects a choice: the non-streaming answer, and the rows of a "final" stream."""

    def __init__(self, plan: ChoicePlan, layout: RoutingLayout) -> None:
        self._ledger = RowLedger(plan, layout)
        self._layout = layout
        self._rows: list[RoutingArray] = []
        self.tokens: list[SampledToken] = []
        self.finish: Finish | None = None

    def feed(self, chunk: Chunk) -> None:
        self._rows.append(self._ledger.add(chunk))
        self.tokens.extend(chunk.tokens)
        self.finish = chunk.finish

    def rows(self) -> tuple[RoutingArray, ...] | None:
        """All rows so far, at least one part; None when routing is off or there is no token."""
        if not self._ledger.enabled or not self.tokens:
            return None
        return (self._layout.empty(0), *self._rows)

    def piece(self) -> Piece:
        """Everything so far."""
        return Piece(tuple(self.tokens), self.rows(), self.finish)


class FinalStitcher:
    """Events of a "final" stream: tokens as they come, every row on the last event."""

    def __init__(self, plan: ChoicePlan, layout: RoutingLayout) -> None:
        self._whole = Whole(plan, layout)

    def feed(self, chunk: Chunk) -> Iterator[Piece]:
        self._whole.feed(chunk)
        if chunk.tokens or chunk.finish:
            yield Piece(chunk.tokens, self._whole.rows() if chunk.finish else None, chunk.finish)


@dataclass(slots=True)
class _Draft:
    """The event being filled: some tokens and the half-open range of the chunk's rows that goes with them."""

    first_row: int
    end_row: int
    tokens: list[SampledToken] = field(default_factory=list)
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
    """

    def __init__(
        self,
        plan: ChoicePlan,
        layout: RoutingLayout,
        budget_bytes: int,
        first_budget_bytes: int,
    ) -> None:
        self._ledger = RowLedger(plan, layout)
        self._layout = layout
        self._budget = first_budget_bytes
        self._later_budget = budget_bytes
        self._sent_array = False

    def feed(self, chunk: Chunk) -> Iterator[Piece]:
        """The chunk as events, in order; each keeps the rule of the module's docstring."""
        tokens_before = self._ledger.num_tokens
        rows_TLK = self._ledger.add(chunk)
        drafts = list(self._cut(chunk, tokens_before))
        for at, draft in enumerate(drafts):
            finish = chunk.finish if at == len(drafts) - 1 else None
            array_TLK = self._array(rows_TLK, draft, finish)
            yield Piece(tuple(draft.tokens), None if array_TLK is None else (array_TLK,), finish)

    def _cut(self, chunk: Chunk, tokens_before: int) -> Iterator[_Draft]:
        lead = self._num_lead_rows(chunk, tokens_before)
        draft = _Draft(0, 0)
        while draft.end_row < lead:
            draft.end_row += min(lead - draft.end_row, self._num_rows_that_fit())
            if draft.end_row < lead:
                yield draft
                self._budget = self._later_budget
                draft = _Draft(draft.end_row, draft.end_row)
        for at, token in enumerate(chunk.tokens):
            num_rows = 1 if tokens_before + at > 0 and self._ledger.enabled else 0
            cost = token_bytes(token)
            if not draft.empty and self._size(draft, num_rows, cost) > self._budget:
                yield draft
                self._budget = self._later_budget
                draft = _Draft(draft.end_row, draft.end_row)
            draft.tokens.append(token)
            draft.token_bytes += cost
            draft.end_row += num_rows
        if not draft.empty or chunk.finish:
            yield draft
            self._budget = self._later_budget

    def _num_lead_rows(self, chunk: Chunk, tokens_before: int) -> int:
        """Rows of the chunk that belong to the prompt and therefore go before (or with) its first token."""
        if not chunk.tokens:
            return chunk.num_rows
        if tokens_before or not self._ledger.enabled:
            return 0
        return chunk.num_rows - (len(chunk.tokens) - 1)

    def _num_rows_that_fit(self) -> int:
        return max(1, (self._budget // 4 * 3 - NPY_HEADER_BYTES) // self._layout.row_bytes)

    def _size(self, draft: _Draft, num_more_rows: int, more_token_bytes: int) -> int:
        num_rows = draft.end_row - draft.first_row + num_more_rows
        return draft.token_bytes + more_token_bytes + base64_bytes(num_rows * self._layout.row_bytes)

    def _array(self, rows_TLK: RoutingArray, draft: _Draft, finish: Finish | None) -> RoutingArray | None:
        aborted_before_first_token = self._ledger.num_tokens == 0
        owed_empty = finish is not None and not self._sent_array and not aborted_before_first_token
        if not self._ledger.enabled or (draft.first_row == draft.end_row and not owed_empty):
            return None
        self._sent_array = True
        return rows_TLK[draft.first_row : draft.end_row]


Stitcher = DeltaStitcher | FinalStitcher


def base64_bytes(num_bytes: int) -> int:
    """Length of the base64 of an .npy file with that much data; 0 for no rows, because none is sent then."""
    return (NPY_HEADER_BYTES + num_bytes + 2) // 3 * 4 if num_bytes else 0


def token_bytes(token: SampledToken) -> int:
    """Upper bound of what a token takes in an event's JSON: its id, and its logprobs if there are any.

    A uint32 takes at most 10 characters and a float 24; the rest is keys, brackets and commas.
    """
    if token.logprob is None:
        return 11
    return 11 + 128 + 96 * (1 + len(token.top))
