"""What the engine knows about one live request."""

from enum import Enum

from common.engine.request import EngineRequest, Work
from common.kv.pool import BlockId


class Phase(Enum):
    """Where a live sequence stands.

    WHOLE: WAITING → PREFILLING → DECODING; PREFILL: WAITING → PREFILLING → PREFILLED;
    DECODE: WAITING → LEASED → DECODING. A sequence that ends is forgotten.
    """

    WAITING = "waiting"
    #: Blocks are reserved; somebody else writes the prompt into them.
    LEASED = "leased"
    PREFILLING = "prefilling"
    #: The prompt and the first token are done; the blocks are being read by somebody else.
    PREFILLED = "prefilled"
    DECODING = "decoding"


class SequenceState:
    """Mutable state of one request; only the engine thread touches it.

    Attributes:
        token_ids: prompt, then generated tokens.
        blocks: all blocks that the request will ever need; empty while WAITING.
        num_computed: KV and rows of positions [0, num_computed) are in `blocks`.
        rows_sent: rows of positions [routing_start, rows_sent) have left; meaningless when no rows are wanted.
    """

    __slots__ = ("blocks", "num_computed", "phase", "request", "rows_sent", "token_ids")

    def __init__(self, request: EngineRequest) -> None:
        self.request = request
        self.phase = Phase.WAITING
        self.token_ids = list(request.prompt)
        self.blocks: tuple[BlockId, ...] = ()
        self.num_computed = 0
        self.rows_sent = request.routing_start or 0

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt)

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def wants_rows(self) -> bool:
        return self.request.routing_start is not None

    def violations(self, block_size: int) -> list[str]:
        """What is wrong with this sequence, one sentence each."""
        name, found = f"sequence {self.request.request_id!r}", []
        want_blocks = 0 if self.phase is Phase.WAITING else -(-self.request.num_slots // block_size)
        if len(self.blocks) != want_blocks:
            found.append(f"{name} is {self.phase.value} and holds {len(self.blocks)} blocks instead of {want_blocks}")
        if self.phase not in _PHASES[self.request.work]:
            found.append(f"{name} is {self.phase.value}, which {self.request.work.value} work never is")
        if not self._counts_fit_phase():
            found.append(
                f"{name} is {self.phase.value} with {self.num_computed} computed of {self.num_prompt} prompt "
                f"and {self.num_generated} generated tokens"
            )
        if self.wants_rows and self.rows_sent > max(self.num_computed, self.request.routing_start or 0):
            found.append(f"{name} sent {self.rows_sent} rows but computed {self.num_computed} positions")
        return found

    def _counts_fit_phase(self) -> bool:
        computed, prompt, generated = self.num_computed, self.num_prompt, self.num_generated
        match self.phase:
            case Phase.WAITING:
                return computed == 0 and generated == 0
            case Phase.LEASED:
                return computed <= prompt and generated == 0
            case Phase.PREFILLING:
                return computed < prompt and generated == 0
            case Phase.PREFILLED:
                return computed == prompt and generated == 1
            case Phase.DECODING:
                return computed == prompt + generated - 1 and generated < self.request.sampling.max_tokens


_PHASES = {
    Work.WHOLE: {Phase.WAITING, Phase.PREFILLING, Phase.DECODING},
    Work.PREFILL: {Phase.WAITING, Phase.PREFILLING, Phase.PREFILLED},
    Work.DECODE: {Phase.WAITING, Phase.LEASED, Phase.DECODING},
}
