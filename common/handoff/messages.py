"""What a prefill worker (P) and a decode worker (D) say to each other: the headers, as msgpack maps tagged by `type`.

Hello, Ready and Refuse are what workers of different versions must still understand: they only ever gain fields with
defaults, and unknown fields are ignored. Every other message belongs to one protocol version and is strict.
"""

from enum import StrEnum
from typing import Annotated, NewType

import msgspec

from common.sampling import SampledToken

#: Version of everything in this module; raised by any change that an older worker could not follow.
HANDOFF_PROTOCOL_VERSION = 5

#: Number of a transfer on its decode worker, never reused while that process lives.
TransferId = NewType("TransferId", int)
#: Random tag of a lease; messages that do not carry it are discarded.
Generation = NewType("Generation", int)

#: Version 00 has 55 characters; later ones may have more.
MAX_TRACEPARENT_CHARS = 256

Count = Annotated[int, msgspec.Meta(ge=0)]


#: Longest reason on the wire and in the log: enough for any sentence of ours, however much of a peer's text it quotes.
MAX_REASON_CHARS = 1000


class FailureKind(StrEnum):
    """Why a handoff ended early, as far as the other side can act on it."""

    #: The lease does not exist (any more), or the two sides do not fit.
    REFUSED = "refused"
    #: A size, range, order or checksum is wrong.
    CORRUPT = "corrupt"
    #: No progress within the lease's timeout.
    TIMEOUT = "timeout"
    #: One side gave up, or went away.
    ABORTED = "aborted"


class HandoffIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that must be equal on both sides, and `instance_id`, which is drawn at each process start."""

    instance_id: str
    protocol_version: int = HANDOFF_PROTOCOL_VERSION
    #: Hash of the model's configuration and tensors.
    fingerprint: str
    weight_version: str
    #: Instruction set, library versions, kernel path: equal strings compute equal bytes.
    numerics: str
    #: "float32" or "bfloat16".
    dtype: str
    block_size: int
    num_layers: int
    #: 2: K and V; 1: one compressed vector that both are read from.
    num_kv_planes: int
    num_kv_heads: int
    head_dim: int
    #: "uint8", "uint16" or "int32".
    routing_dtype: str
    top_k: int
    num_experts: int
    routing_enabled: bool
    max_model_len: int


def first_difference(ours: HandoffIdentity, theirs: HandoffIdentity) -> str | None:
    """A sentence that names the first field in which two workers differ and both values; None if they fit."""
    for field in ("protocol_version", *HandoffIdentity.__struct_fields__):
        mine, other = getattr(ours, field), getattr(theirs, field)
        if field != "instance_id" and mine != other:
            return f"the workers differ in {field}: {_short(mine)} here, {_short(other)} on the other side"
    return None


def shortened(reason: str) -> str:
    """At most MAX_REASON_CHARS of a sentence that may quote what a peer sent."""
    return reason if len(reason) <= MAX_REASON_CHARS else reason[: MAX_REASON_CHARS - 1] + "…"


def _short(value: object) -> str:
    """`repr`, but for long strings only their beginning: a numerics description is 100 characters long."""
    return repr(value[:200] + "…") if isinstance(value, str) and len(value) > 200 else repr(value)


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """P → D, first message of a connection."""

    identity: HandoffIdentity


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """D → P, answers Hello: the two fit. Each transfer may have this much unacknowledged."""

    identity: HandoffIdentity
    credit_bytes: Annotated[int, msgspec.Meta(gt=0)]
    credit_chunks: Annotated[int, msgspec.Meta(gt=0)]


class Refuse(msgspec.Struct, frozen=True, kw_only=True, tag="refuse"):
    """D → P: nothing more is accepted on this connection, and why."""

    reason: str


class _Addressed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A message about one transfer."""

    transfer_id: TransferId
    generation: Generation


class Renew(_Addressed, frozen=True, kw_only=True, tag="renew"):
    """P → D: the transfer is alive, even if its prompt still waits for its turn. Extends the lease."""


class Chunk(_Addressed, frozen=True, kw_only=True, tag="chunk"):
    """P → D: KV and rows of positions [start, end), and the prompt logprobs of the next positions; either may be none.

    The frames after this header hold `kv_bytes`, `rows_bytes` and `scores_bytes` bytes.
    """

    #: Number of chunks before this one in the transfer.
    seq: Count
    start: Count
    end: Count
    kv_bytes: Count
    rows_bytes: Count
    scores_bytes: Count
    #: xxh3-64 of each payload frame.
    kv_checksum: Count
    rows_checksum: Count
    scores_checksum: Count


class Close(_Addressed, frozen=True, kw_only=True, omit_defaults=True, tag="close"):
    """P → D: all chunks are sent; the token that follows the prompt, for each choice."""

    num_chunks: Count
    #: Prompt tokens whose forward pass ran on P for this request; the others were in its prefix cache.
    num_computed: Count
    first_tokens: Annotated[tuple[SampledToken, ...], msgspec.Meta(min_length=1)]
    #: Names the span that sent the handoff, as W3C's traceparent; empty if the request is not traced.
    traceparent: Annotated[str, msgspec.Meta(max_length=MAX_TRACEPARENT_CHARS)] = ""


class Abort(_Addressed, frozen=True, kw_only=True, tag="abort"):
    """P → D: the transfer ends here, unfinished."""

    reason: str


class Credit(_Addressed, frozen=True, kw_only=True, tag="credit"):
    """D → P: this much more has been written into its slots and may be sent again."""

    num_bytes: Count
    num_chunks: Count


class Done(_Addressed, frozen=True, kw_only=True, tag="done"):
    """D → P: everything, the first tokens included, has been applied."""


class Reject(_Addressed, frozen=True, kw_only=True, tag="reject"):
    """D → P: the transfer has failed, or its lease is not known; everything sent for it is discarded."""

    kind: FailureKind
    reason: str


PrefillMessage = Hello | Renew | Chunk | Close | Abort
DecodeMessage = Ready | Refuse | Credit | Done | Reject
