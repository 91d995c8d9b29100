"""What goes into the engine and what comes out of it: plain records, no threads and no sockets."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NewType

from common.engine.grammar import GrammarMatcher
from common.errors import MoerelayError
from common.kv.pool import BlockId
from common.prompt_logprobs import PromptLogprobs
from common.routing.record import RoutingArray
from common.sampling import Finish, SampledToken, SamplingParams

RequestId = NewType("RequestId", str)


class Work(Enum):
    """Which part of a request one engine does."""

    #: Prefill and decode here.
    WHOLE = "whole"
    #: Prefill here and sample the first token; blocks stay held until `Engine.cancel`.
    PREFILL = "prefill"
    #: Blocks for the prompt are reserved here, somebody else fills them, then `Engine.commit_handoff` starts decoding.
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One prompt and its `sampling.n` choices. `routing_start` is None when no rows are wanted."""

    request_id: RequestId
    prompt: Sequence[int]
    sampling: SamplingParams
    routing_start: int | None
    work: Work = Work.WHOLE
    #: Lower is admitted first and preempted last; equal ones in order of arrival.
    priority: int = 0
    #: Compiled from `sampling.grammar`, nothing accepted yet; every choice gets a fork.
    matcher: GrammarMatcher | None = field(default=None, compare=False)
    #: Only requests with the same one share cached prefixes.
    cache_salt: str = ""
    #: Work.DECODE: the prompt is computed here if no more of its tokens than this are missing from the prefix cache.
    local_prefill_max_tokens: int = 0

    @property
    def num_slots(self) -> int:
        """Slots that the prompt and one choice need at most: every position that this engine may forward.

        The last generated token is never forwarded; a prefill worker forwards the prompt only.
        """
        return len(self.prompt) + (0 if self.work is Work.PREFILL else self.sampling.max_tokens - 1)


@dataclass(frozen=True, slots=True)
class BlocksLeased:
    """Work.DECODE: the prompt's blocks are reserved.

    The handoff may be written into them from position `num_cached` on; what is before is there, and others read it too.
    """

    request_id: RequestId
    blocks: tuple[BlockId, ...]
    num_cached: int = 0


@dataclass(frozen=True, slots=True)
class PrefillsLocally:
    """Work.DECODE: so little of the prompt is missing here that no handoff is awaited; goes on like Work.WHOLE."""

    request_id: RequestId
    num_cached: int = 0


@dataclass(frozen=True, slots=True)
class PromptAdvanced:
    """Work.PREFILL: KV and rows of positions [0, computed) are in `blocks`, those of [0, num_cached) found there.

    The last one carries the first token of every choice. `prompt_logprobs` are those of the positions since the last
    event; None if the request asked for none.
    """

    request_id: RequestId
    blocks: tuple[BlockId, ...]
    computed: int
    first_tokens: tuple[SampledToken, ...] = ()
    prompt_logprobs: PromptLogprobs | None = None
    num_cached: int = 0


@dataclass(frozen=True, slots=True)
class Progress:
    """Work.WHOLE and Work.DECODE: what became available for one choice since its last event; `finish` ends the choice.

    `rows_TLK` holds the rows of positions that became final, from `routing_start` on; None when routing is off.
    With Work.WHOLE an event without tokens brings the rows, and the `prompt_logprobs`, of a prompt chunk. The rows come
    with choice 0, the logprobs with the first choice that was not aborted. The other choices exist from the first token
    on, and their first event has all rows of the prompt.
    """

    request_id: RequestId
    tokens: tuple[SampledToken, ...]
    rows_TLK: RoutingArray | None
    finish: Finish | None
    choice: int = 0
    prompt_logprobs: PromptLogprobs | None = None
    #: With a first token: prompt tokens whose forward pass ran nowhere for this request.
    num_cached: int = 0


@dataclass(frozen=True, slots=True)
class Failed:
    """The request ended, with all of its choices, in an error; it holds nothing any more."""

    request_id: RequestId
    error: MoerelayError


EngineEvent = BlocksLeased | PrefillsLocally | PromptAdvanced | Progress | Failed


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Live counts, for heartbeats and gauges."""

    running: int
    #: For blocks or a seat, preempted ones included.
    waiting: int
    #: Sequences that lost their blocks and wait to go on.
    preempted: int
    #: Sequences that hold blocks for a handoff: leased and not committed, or prefilled and not released.
    handoffs: int
    #: Held by live sequences.
    kv_blocks_used: int
    #: Held by nobody, and kept for the prefix cache.
    kv_blocks_cached: int
    kv_blocks_total: int
    #: Host memory that holds KV and rows of preempted sequences.
    swap_bytes_used: int
    #: What it is meant to keep to.
    swap_bytes_total: int
