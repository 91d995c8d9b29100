"""What a decode worker (D) knows of one handoff on its way in, and what the prefill worker (P) gets to know of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from common.handoff.messages import FailureKind, Generation, TransferId
from common.kv.pool import BlockId
from common.prompt_logprobs import position_bytes


@dataclass(frozen=True, slots=True)
class LeaseRef:
    """A lease as the prefill worker gets to know it, through the router."""

    transfer_id: TransferId
    generation: Generation
    endpoint: str
    #: Leading prompt tokens whose KV and rows the decode worker has already (whole blocks).
    num_cached_tokens: int
    #: Seconds without progress after which either side gives up.
    timeout_s: float
    #: Process of the decode worker that granted the lease.
    instance_id: str


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a lease ended early, as a kind and a sentence."""

    kind: FailureKind
    reason: str


PEER_GONE = Failure(FailureKind.ABORTED, "the prefill worker went away during the handoff")


class LeaseState(Enum):
    """Whether the lease accepts messages."""

    OPEN = auto()
    #: Ended early during a write; the write's end removes it.
    DRAINING = auto()


@dataclass(slots=True, eq=False)
class Lease:
    """One handoff on its way in. `blocks` are all blocks of the sequence; those of cached tokens are only read."""

    transfer_id: TransferId
    generation: Generation
    request_id: str
    blocks: Sequence[BlockId]
    num_cached: int
    num_tokens: int
    routing: bool
    #: Alternatives in each entry of prompt logprobs; None if none travel.
    num_top: int | None
    deadline: float
    #: Positions [0, position) are cached or received.
    position: int
    #: Positions [0, num_scored) have their prompt logprobs, if those travel.
    num_scored: int = 0
    next_seq: int = 0
    #: When the first chunk came; None before.
    began: float | None = None
    #: Connection that sends this handoff; the first message binds it.
    peer: bytes | None = None
    writing: bool = False
    state: LeaseState = LeaseState.OPEN
    #: Set when the lease ended early; None too when it was revoked, of which its owner knows.
    failure: Failure | None = None

    @property
    def score_bytes(self) -> int:
        """Bytes of one position's prompt logprobs; 0 if none travel."""
        return 0 if self.num_top is None else position_bytes(self.num_top)
