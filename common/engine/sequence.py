"""What the engine knows about one live choice."""

from enum import Enum

from common.engine.grammar import GrammarMatcher
from common.engine.request import EngineRequest, Work
from common.engine.saved import SavedRange
from common.kv.chain import TokenChain
from common.kv.pool import BlockId

#: Priority, number of the request's arrival, choice: of two sequences the one with the smaller is more urgent.
Urgency = tuple[int, int, int]


class Phase(Enum):
    """Where a live sequence stands.

    WHOLE: WAITING → PREFILLING → DECODING; PREFILL: WAITING → PREFILLING → PREFILLED;
    DECODE: WAITING → LEASED → DECODING, or as WHOLE; choices beside the first one: FORKED → DECODING.
    DECODING, RECOMPUTING and FORKED → PREEMPTED → DECODING, or RECOMPUTING → DECODING.
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
    #: It has generated tokens and no blocks: they were needed by more urgent ones. A seat and blocks are waited for.
    PREEMPTED = "preempted"
    #: It is back, and positions whose KV was not kept are forwarded again.
    RECOMPUTING = "recomputing"


class SequenceState:
    """Mutable state of one choice; only the engine thread touches it. Choice 0's also is the prompt's.

    Attributes:
        urgency: its place among all sequences.
        token_ids: prompt, then generated tokens.
        blocks: those of the known tokens, or of all but the last one; only the prompt's full ones while FORKED, none
            while WAITING or PREEMPTED.
        num_shared: leading blocks that it took over with their content: from the prefix cache, or from choice 0.
        num_cached: prompt tokens whose forward pass ran nowhere for this request.
        chain: names of the full blocks, as far as they have been needed.
        epoch: of the prefix cache, when the blocks were first given; None if they must not be cached.
        weights: all KV was computed under this count of `PrefixCache.num_weight_changes`; None if it was not.
        saved: copies of what is not in `blocks`: while FORKED of the prompt's tail, while PREEMPTED of
            [0, num_computed).
        num_computed: KV and rows of positions [0, num_computed) are in `blocks`, or in `saved`.
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
        "num_prompt",
        "num_shared",
        "phase",
        "request",
        "rows_sent",
        "saved",
        "token_ids",
        "urgency",
        "wants_rows",
        "weights",
    )

    def __init__(self, request: EngineRequest, arrival: int, chain: TokenChain, epoch: int | None) -> None:
        self.request = request
        self.urgency: Urgency = (request.priority, arrival, 0)
        self.chain = chain
        self.epoch = epoch
        self.choice = 0
        self.phase = Phase.WAITING
        self.token_ids = list(request.prompt)
        self.num_prompt = len(request.prompt)
        self.wants_rows = request.routing_start is not None
        self.blocks: tuple[BlockId, ...] = ()
        self.num_shared = 0
        self.num_cached = 0
        self.weights: int | None = None
        self.saved: tuple[SavedRange, ...] = ()
        self.num_computed = 0
        self.rows_sent = request.routing_start or 0
        self.matcher: GrammarMatcher | None = None

    def forked(self, choice: int, block_size: int, tail: tuple[SavedRange, ...]) -> "SequenceState":
        """Another choice of the same prompt, whose rows have been told."""
        num_shared = self.num_prompt // block_size
        priority, arrival, _ = self.urgency
        sibling = SequenceState(self.request, arrival, self.chain.fork(num_shared), self.epoch)
        sibling.urgency = (priority, arrival, choice)
        sibling.weights = self.weights
        sibling.choice = choice
        sibling.phase = Phase.FORKED
        sibling.num_shared = num_shared
        sibling.blocks = self.blocks[:num_shared]
        sibling.saved = tail
        sibling.num_computed = sibling.rows_sent = self.num_prompt
        return sibling

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def num_forwarded(self) -> int:
        """Positions whose KV has existed: all known tokens but the last one, once that was sampled."""
        return len(self.token_ids) - 1 if self.num_generated else self.num_computed

    def num_blocks(self, block_size: int) -> int:
        """Blocks that hold the known tokens."""
        return -(-len(self.token_ids) // block_size)

    def max_blocks(self, block_size: int) -> int:
        """Blocks that it will never outgrow."""
        return -(-self.request.num_slots // block_size)

    def violations(self, block_size: int) -> list[str]:
        """What is wrong with this sequence, one sentence each."""
        name, found = f"sequence {self.name}", []
        least, most = self._want_blocks(block_size)
        if not least <= len(self.blocks) <= most:
            found.append(f"{name} is {self.phase.value} and holds {len(self.blocks)} blocks, not {least} to {most}")
        if self.phase not in (_FORKED_PHASES if self.choice else _PHASES[self.request.work]):
            kind = "a forked choice" if self.choice else f"{self.request.work.value} work"
            found.append(f"{name} is {self.phase.value}, which {kind} never is")
        if not self._counts_fit_phase():
            found.append(
                f"{name} is {self.phase.value} with {self.num_computed} computed of {self.num_prompt} prompt "
                f"and {self.num_generated} generated tokens"
            )
        if self.wants_rows and self.rows_sent > max(self.num_forwarded, self.request.routing_start or 0):
            found.append(f"{name} sent {self.rows_sent} rows but computed {self.num_forwarded} positions")
        return found

    def saved_violations(self, block_size: int) -> list[str]:
        """What is wrong with the copies that it keeps, one sentence each."""
        at, end = 0, 0
        if self.phase is Phase.FORKED:
            at, end = self.num_shared * block_size, self.num_prompt
        elif self.phase is Phase.PREEMPTED:
            end = self.num_computed
        for saved in self.saved:
            if saved.start != at:
                return [f"sequence {self.name} keeps positions from {saved.start} on, not from {at}"]
            at = saved.end
        return [] if at == end else [f"sequence {self.name} keeps positions up to {at}, not up to {end}"]

    @property
    def name(self) -> str:
        """For messages: the request's id, with the choice if there are others."""
        return repr(self.request.request_id) + (f" choice {self.choice}" if self.request.sampling.n > 1 else "")

    def _want_blocks(self, block_size: int) -> tuple[int, int]:
        """The least and the most that it may hold."""
        match self.phase:
            case Phase.WAITING | Phase.PREEMPTED:
                return 0, 0
            case Phase.FORKED:
                return self.num_prompt // block_size, self.num_prompt // block_size
            case Phase.DECODING:
                ahead = min(len(self.token_ids) // block_size + 1, self.max_blocks(block_size))
                return -(-self.num_computed // block_size), ahead
            case _:
                return self.num_blocks(block_size), self.num_blocks(block_size)

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
                return computed == prompt + generated - 1 and 0 < generated < self.request.sampling.max_tokens
            case Phase.PREEMPTED:
                return computed < prompt + generated and 0 < generated < self.request.sampling.max_tokens
            case Phase.RECOMPUTING:
                return computed < prompt + generated - 1 and 0 < generated < self.request.sampling.max_tokens


_PREEMPTIBLE = {Phase.DECODING, Phase.PREEMPTED, Phase.RECOMPUTING}
_PHASES = {
    Work.WHOLE: {Phase.WAITING, Phase.PREFILLING, *_PREEMPTIBLE},
    Work.PREFILL: {Phase.WAITING, Phase.PREFILLING, Phase.PREFILLED},
    Work.DECODE: {Phase.WAITING, Phase.LEASED, Phase.PREFILLING, *_PREEMPTIBLE},
}
_FORKED_PHASES = {Phase.FORKED, *_PREEMPTIBLE}
