"""What the engine knows about one live request: its prompt and its choices."""

from common.engine.request import EngineRequest, Work
from common.engine.sequence import Phase, SequenceState
from common.kv.chain import TokenChain


class ChoiceGroup:
    """One live request; only the engine thread touches it.

    Attributes:
        arrival: counts requests in the order in which they came.
        open: choices that have not ended; never empty.
        sequences: by choice. Until the prompt is there only choice 0's, which computes or receives it for all, whether
            or not that choice itself is open; from then on those of the open choices.
        is_forked: the prompt is there, and the first token of every choice.
        seated_s: how long after the request it got its seat; 0 before.
        ttft_s: how long after the request the first tokens came; 0 before.
        worst_itl_s: mean time between tokens of the slowest choice that has ended.
    """

    def __init__(self, request: EngineRequest, arrival: int, chain: TokenChain, epoch: int) -> None:
        self.request = request
        self.arrival = arrival
        self.open = set(range(request.sampling.n))
        self.sequences = {0: SequenceState(request, arrival, chain, epoch)}
        self.is_forked = False
        self.seated_s = 0.0
        self.ttft_s = 0.0
        self.worst_itl_s = 0.0

    @property
    def prompt(self) -> SequenceState:
        """The sequence that stands for the prompt, until the group is forked."""
        return self.sequences[0]

    def violations(self, block_size: int) -> list[str]:
        """What is wrong with this request, one sentence each."""
        name, found = f"request {self.request.request_id!r}", []
        if not self.open or not self.open <= set(range(self.request.sampling.n)):
            found.append(f"{name} has the open choices {sorted(self.open)} of {self.request.sampling.n}")
        want = self.open if self.is_forked else {0}
        if set(self.sequences) != want:
            found.append(f"{name} has sequences of the choices {sorted(self.sequences)} instead of {sorted(want)}")
        if self.is_forked and (self.request.work is Work.PREFILL or self.phases() & _BEFORE_FORK):
            found.append(f"{name} is forked but not decoding")
        held = {s.blocks for s in self.sequences.values() if s.phase is Phase.FORKED}
        if len(held) > 1:
            found.append(f"{name} has forked choices that do not share the prompt's blocks")
        return found + [sentence for s in self.sequences.values() for sentence in s.violations(block_size)]

    def phases(self) -> set[Phase]:
        """Of its sequences."""
        return {s.phase for s in self.sequences.values()}


_BEFORE_FORK = {Phase.WAITING, Phase.LEASED, Phase.PREFILLING, Phase.PREFILLED}
