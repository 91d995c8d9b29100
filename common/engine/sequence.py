"""What the engine knows about one live choice."""

from enum import Enum

from common.engine.fork import PromptTail
from common.engine.grammar import GrammarMatcher
from common.engine.request import EngineRequest, Work
from common.kv.chain import TokenChain
from common.kv.pool import BlockId


class Phase(Enum):
    """Where a live sequence stands.

    WHOLE: WAITING → PREFILLING → DECODING; PREFILL: WAITING → PREFILLING → PREFILLED;
    DECODE: WAITING → LEASED → DECODING; choices beside the first one: FORKED → DECODING.
    A sequence that ends is forgotten.
    """

    WAITING = "waiting"
    #: Blocks are reserved; somebody else writes the prompt into them.
    LEASED = "leased"
    PREFILLING = "prefilling"
    #: The prompt and the first tokens are done; the blocks are being read by somebody else.
    PREFILLED = "prefilled"
    #: The first token is told; only the prompt's full blocks are held, and a seat and the other blocks are waited for.
    FORKED = "forked"
    DECODING = "decoding"


class SequenceState:
    """Mutable state of one choice; only the engine thread touches it. Choice 0's also is the prompt's.

    Attributes:
        token_ids: prompt, then generated tokens.
        blocks: all blocks that the choice will ever need; none while WAITING, only the shared ones while FORKED.
        num_shared: leading blocks that it took over with their content: from the prefix cache, or from choice 0.
        num_cached: prompt tokens whose forward pass ran nowhere for this request.
        chain: names of the full blocks, as far as they have been needed.
        epoch: of the prefix cache, when the blocks were given; None if they must not be cached.
        tail: what the first block of its own begins with, as long as it is FORKED and the prompt ends inside a block.
        num_computed: KV and rows of positions [0, num_computed) are in `blocks`, but for those in `tail`.
        rows_sent: rows of positions [routing_start, rows_sent) have left; meaningless when no rows are wanted.
        matcher: where the grammar stands after the last token; None without a grammar.
    """

    __slots__ = (
        "blocks",
        "chain",
        "choice",
        "epoch",
        "matcher",
        "num_cached",
        "num_computed",
        "num_shared",
        "phase",
        "request",
        "rows_sent",
        "tail",
        "token_ids",
    )

    def __init__(self, request: EngineRequest, chain: TokenChain, epoch: int | None) -> None:
        self.request = request
        self.chain = chain
        self.epoch = epoch
        self.choice = 0
        self.phase = Phase.WAITING
        self.token_ids = list(request.prompt)
        self.blocks: tuple[BlockId, ...] = ()
        self.num_shared = 0
        self.num_cached = 0
        self.tail: PromptTail | None = None
        self.num_computed = 0
        self.rows_sent = request.routing_start or 0
        self.matcher: GrammarMatcher | None = None

    def forked(self, choice: int, block_size: int, tail: PromptTail | None) -> "SequenceState":
        """Another choice of the same prompt, whose rows have been told."""
        num_shared = self.num_prompt // block_size
        sibling = SequenceState(self.request, self.chain.fork(num_shared), self.epoch)
        sibling.choice = choice
        sibling.phase = Phase.FORKED
        sibling.num_shared = num_shared
        sibling.blocks = self.blocks[:num_shared]
        sibling.tail = tail
        sibling.num_computed = sibling.rows_sent = self.num_prompt
        return sibling

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt)

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def wants_rows(self) -> bool:
        return self.request.routing_start is not None

    def num_blocks(self, block_size: int) -> int:
        """Blocks that it holds in any phase but WAITING and FORKED."""
        return -(-self.request.num_slots // block_size)

    def violations(self, block_size: int) -> list[str]:
        """What is wrong with this sequence, one sentence each."""
        name, found = f"sequence {self.name}", []
        want_blocks = self._want_blocks(block_size)
        if len(self.blocks) != want_blocks:
            found.append(f"{name} is {self.phase.value} and holds {len(self.blocks)} blocks instead of {want_blocks}")
        if self.phase not in (_FORKED_PHASES if self.choice else _PHASES[self.request.work]):
            kind = "a forked choice" if self.choice else f"{self.request.work.value} work"
            found.append(f"{name} is {self.phase.value}, which {kind} never is")
        if not self._counts_fit_phase():
            found.append(
                f"{name} is {self.phase.value} with {self.num_computed} computed of {self.num_prompt} prompt "
                f"and {self.num_generated} generated tokens"
            )
        if self.wants_rows and self.rows_sent > max(self.num_computed, self.request.routing_start or 0):
            found.append(f"{name} sent {self.rows_sent} rows but computed {self.num_computed} positions")
        if self.tail is not None and self.phase is not Phase.FORKED:
            found.append(f"{name} is {self.phase.value} and keeps a copy of the prompt's tail")
        return found

    @property
    def name(self) -> str:
        """For messages: the request's id, with the choice if there are others."""
        return repr(self.request.request_id) + (f" choice {self.choice}" if self.request.sampling.n > 1 else "")

    def _want_blocks(self, block_size: int) -> int:
        if self.phase is Phase.WAITING:
            return 0
        return self.num_shared if self.phase is Phase.FORKED else self.num_blocks(block_size)

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
                return computed == prompt and generated == 0
            case Phase.FORKED:
                return computed == prompt and generated == 1 < self.request.sampling.max_tokens
            case Phase.DECODING:
                return computed == prompt + generated - 1 and generated < self.request.sampling.max_tokens


_PHASES = {
    Work.WHOLE: {Phase.WAITING, Phase.PREFILLING, Phase.DECODING},
    Work.PREFILL: {Phase.WAITING, Phase.PREFILLING, Phase.PREFILLED},
    Work.DECODE: {Phase.WAITING, Phase.LEASED, Phase.DECODING},
}
_FORKED_PHASES = {Phase.FORKED, Phase.DECODING}
