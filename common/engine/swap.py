"""How much host memory the KV of preempted sequences may take. Sans-I/O: counts, no copies."""

from collections.abc import Iterable

from common.engine.sequence import Phase, SequenceState


class SwapSpace:
    """An account of the copies of [0, num_computed) that PREEMPTED sequences keep.

    Choices of one prompt are counted as if none of them shared a copy.

    Args:
        limit_bytes: what `try_take` keeps to.
        kv_token_bytes: KV of one position, in all layers.
        row_bytes: its routing row.
    """

    def __init__(self, limit_bytes: int, kv_token_bytes: int, row_bytes: int) -> None:
        self.used_bytes = 0
        self.limit_bytes = limit_bytes
        self._kv_token_bytes = kv_token_bytes
        self._row_bytes = row_bytes

    def size_of(self, sequence: SequenceState) -> int:
        """Bytes of what has been computed of a sequence."""
        return sequence.num_computed * (self._kv_token_bytes + (self._row_bytes if sequence.wants_rows else 0))

    def try_take(self, sequence: SequenceState) -> bool:
        """Counts the copy of a sequence, unless that exceeds the limit."""
        if self.used_bytes + self.size_of(sequence) > self.limit_bytes:
            return False
        self.take(sequence)
        return True

    def take(self, sequence: SequenceState) -> None:
        """Counts the copy of a sequence that cannot do without, also beyond the limit."""
        self.used_bytes += self.size_of(sequence)

    def give_back(self, sequence: SequenceState) -> None:
        """The copy of a PREEMPTED sequence is not needed any more."""
        self.used_bytes -= self.size_of(sequence)

    def check_invariants(self, sequences: Iterable[SequenceState]) -> list[str]:
        """Violations, one sentence each, given all live sequences."""
        want = sum(self.size_of(s) for s in sequences if s.phase is Phase.PREEMPTED)
        return [] if self.used_bytes == want else [f"{self.used_bytes} saved bytes are counted instead of {want}"]
