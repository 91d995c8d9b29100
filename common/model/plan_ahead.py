"""Works the plan of the next forward pass out while the present one runs.

What a batch attends to, and where its K and V go, is known before its token ids are. Only the engine knows what will
probably be computed next; when something else comes instead, its plan is made as if nothing had been prepared.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from common.model.batch import Chunk
from common.model.plan import ForwardPlan


@dataclass(frozen=True, slots=True)
class _Prepared:
    chunks: Sequence[Chunk]
    plan: Future[ForwardPlan]


class PlanAhead:
    """Makes plans: on a thread of its own those that are prepared, on the caller's those that were not.

    Attributes:
        num_ready: plans that were made when they were taken.
        num_awaited: those that were still being made.
        num_unforeseen: those that nobody had prepared.
    """

    def __init__(self, make: Callable[[Sequence[Chunk]], ForwardPlan]) -> None:
        self.num_ready = 0
        self.num_awaited = 0
        self.num_unforeseen = 0
        self._make = make
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="plan-ahead")
        self._prepared: _Prepared | None = None
        self._taken: _Prepared | None = None

    def prepare(self, chunks: Sequence[Chunk]) -> None:
        """Begins with the plan after the one that is taken next. The ids in `chunks` do not count."""
        self._taken = self._prepared
        self._prepared = _Prepared(chunks, self._thread.submit(self._make, chunks)) if chunks else None

    def take(self, chunks: Sequence[Chunk]) -> ForwardPlan:
        """The plan of a batch."""
        taken, self._taken = self._taken, None
        if taken is None or not _same_but_for_ids(taken.chunks, chunks):
            self.num_unforeseen += 1
            return self._make(chunks)
        if taken.plan.done():
            self.num_ready += 1
        else:
            self.num_awaited += 1
        return taken.plan.result().with_ids(chunks)

    @property
    def is_ready(self) -> bool:
        """The plan that was prepared last is made."""
        return self._prepared is not None and self._prepared.plan.done()

    def forget(self) -> None:
        """Drops what is prepared, and its memory."""
        self._prepared = self._taken = None


def _same_but_for_ids(some: Sequence[Chunk], others: Sequence[Chunk]) -> bool:
    """The blocks of `some` hold all of its positions; more of them change nothing."""
    return (
        len(some) == len(others)
        and all(
            (a.start, a.end, a.wants_logits, a.wants_rows) == (b.start, b.end, b.wants_logits, b.wants_rows)
            # Mostly one object, which Python would compare all the same. Unless the sequence has grown meanwhile.
            and (a.blocks is b.blocks or a.blocks == b.blocks[: len(a.blocks)])
            for a, b in zip(some, others, strict=True)
        )
    )
