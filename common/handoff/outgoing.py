"""One transfer as the prefill worker (P) sees it: order, credit, and how it ended. Sans-I/O."""

from dataclasses import dataclass
from enum import Enum, auto

from common.errors import HandoffCorruptError, HandoffError, HandoffRefusedError, HandoffTimeoutError, MoerelayError
from common.handoff.messages import Credit, Done, FailureKind, Reject

#: Chunks that one transfer may have unacknowledged: enough to keep the connection busy while the last ones are written.
CREDIT_CHUNKS = 32
#: Transfers between one pair of workers at a time. With the credit it bounds the queues: see `channel.HIGH_WATER_MARK`.
MAX_TRANSFERS = 512
#: Messages that a transfer sends beside its chunks: close or abort, and one renewal.
CONTROL_MESSAGES = 2

ERROR_OF_KIND: dict[FailureKind, type[HandoffError]] = {
    FailureKind.REFUSED: HandoffRefusedError,
    FailureKind.CORRUPT: HandoffCorruptError,
    FailureKind.TIMEOUT: HandoffTimeoutError,
    FailureKind.ABORTED: HandoffError,
}


class OutgoingState(Enum):
    """Where a transfer stands."""

    OPEN = auto()
    #: The closing message is sent.
    CLOSING = auto()
    DONE = auto()
    FAILED = auto()


@dataclass(frozen=True, slots=True)
class Cut:
    """What one chunk carries: tokens from the transfer's position up to `end`, and the next entries of logprobs."""

    end: int
    num_scores: int = 0


class OutgoingTransfer:
    """What has been sent, what may be sent, and what the decode worker said about it.

    Args:
        start: first position to send; the decode worker has those before it.
        credit_bytes, credit_chunks: what may be unacknowledged.
        token_bytes: payload of one token, KV and row.
        score_bytes: payload of one position's prompt logprobs; 0 if none travel.
        target_bytes: payload at which a chunk is cut.
    """

    def __init__(
        self,
        *,
        start: int,
        credit_bytes: int,
        credit_chunks: int,
        token_bytes: int,
        target_bytes: int,
        score_bytes: int = 0,
    ) -> None:
        if token_bytes + score_bytes > credit_bytes:
            raise HandoffRefusedError(
                f"the decode worker's credit of {credit_bytes} bytes is less than one token's "
                f"{token_bytes + score_bytes}; raise its --handoff-credit-bytes"
            )
        self.position = start
        self.state = OutgoingState.OPEN
        self.num_chunks = 0
        self.num_bytes = 0
        self.error: MoerelayError | None = None
        self._token_bytes = token_bytes
        self._score_bytes = score_bytes
        self._chunk_bytes = min(target_bytes, credit_bytes)
        self._credit_bytes, self._credit_chunks = credit_bytes, credit_chunks
        self._unused_bytes, self._unused_chunks = credit_bytes, credit_chunks

    def split(self, end: int, num_scores: int = 0) -> list[Cut]:
        """The chunks that carry positions [position, end) and `num_scores` entries of logprobs, one after the other.

        Entries may outnumber positions: those of cached positions travel, their KV does not.
        """
        assert self._score_bytes or not num_scores, "no prompt logprobs were announced"
        cuts, position = [], self.position
        tokens_per_chunk = self._tokens_per_chunk(end - position)
        while position < end or num_scores:
            num_tokens = max(0, min(tokens_per_chunk, end - position))
            position += num_tokens
            scored = 0
            if num_scores:
                room = self._chunk_bytes - num_tokens * self._token_bytes
                scored = min(num_scores, max(1, room // self._score_bytes))
                num_scores -= scored
            cuts.append(Cut(position, scored))
        return cuts

    def _tokens_per_chunk(self, num_tokens: int) -> int:
        """Chunks of equal size: a small one behind large ones would cost as much as they do."""
        at_most = max(1, self._chunk_bytes // (self._token_bytes + self._score_bytes))
        num_chunks = max(1, -(-num_tokens // at_most))
        return max(1, -(-num_tokens // num_chunks))

    def has_credit(self, cut: Cut) -> bool:
        """Whether this chunk may be sent now."""
        return self._unused_chunks > 0 and self._cost(cut) <= self._unused_bytes

    def take(self, cut: Cut) -> tuple[int, int]:
        """Uses credit for one chunk; returns its sequence number and start."""
        assert self.state is OutgoingState.OPEN, "the transfer has ended"
        assert self.position < cut.end or (self.position == cut.end and cut.num_scores), "a chunk holds something"
        assert self.has_credit(cut), "a chunk without credit"
        seq, start, cost = self.num_chunks, self.position, self._cost(cut)
        self._unused_bytes -= cost
        self._unused_chunks -= 1
        self.num_chunks += 1
        self.num_bytes += cost
        self.position = cut.end
        return seq, start

    def _cost(self, cut: Cut) -> int:
        return (cut.end - self.position) * self._token_bytes + cut.num_scores * self._score_bytes

    def close(self) -> None:
        """The closing message is about to be sent."""
        assert self.state is OutgoingState.OPEN, "the transfer has ended"
        self.state = OutgoingState.CLOSING

    def on_message(self, message: Credit | Done | Reject) -> None:
        """Applies what the decode worker said. A message that makes no sense fails the transfer."""
        if self.state in (OutgoingState.DONE, OutgoingState.FAILED):
            return
        if isinstance(message, Credit):
            self._on_credit(message)
        elif isinstance(message, Reject):
            self.fail(ERROR_OF_KIND[message.kind](f"the decode worker rejected the handoff: {message.reason}"))
        elif self.state is OutgoingState.CLOSING:
            self.state = OutgoingState.DONE
        else:
            self.fail(HandoffCorruptError("the decode worker acknowledged a handoff that was not closed"))

    def _on_credit(self, credit: Credit) -> None:
        self._unused_bytes += credit.num_bytes
        self._unused_chunks += credit.num_chunks
        if self._unused_bytes > self._credit_bytes or self._unused_chunks > self._credit_chunks:
            self.fail(HandoffCorruptError("the decode worker returned more credit than was used"))

    def fail(self, error: MoerelayError) -> None:
        """Ends the transfer with its first error; a transfer that has ended stays as it is."""
        if self.state not in (OutgoingState.DONE, OutgoingState.FAILED):
            self.state, self.error = OutgoingState.FAILED, error
