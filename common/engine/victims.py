"""Who gives blocks up for others, the least urgent first. Sans-I/O."""

import bisect
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable

from common.engine.line import urgency_of
from common.engine.sequence import Phase, SequenceState
from common.kv.pool import BlockId, BlockPool


class Victims:
    """Sequences that may be preempted, worked out once for as many as are needed.

    Seated ones, and FORKED choices whose prompt such choices alone hold: with the last of them its blocks are free,
    as long as somebody else holds them too, taking them from the choices would gain nothing. While this is in use
    nobody comes in.

    Args:
        seated: all of them may be taken.
        line: FORKED choices in it may be taken.
        wanted: blocks that whoever asks holds or is going to share, so that taking them from others gains nothing.
    """

    def __init__(
        self,
        pool: BlockPool,
        seated: Iterable[SequenceState],
        line: Iterable[SequenceState],
        wanted: Collection[BlockId] = (),
    ) -> None:
        self._pool = pool
        forks = [s for s in line if s.phase is Phase.FORKED and s.blocks]
        self._num_forks = Counter(s.blocks[-1] for s in forks)
        self._seated = sorted(seated, key=urgency_of)
        self._forks: list[SequenceState] = []
        #: Forks whose prompt others hold as well, by its last block.
        self._others: dict[BlockId, list[SequenceState]] = defaultdict(list)
        for fork in sorted(forks, key=urgency_of):
            if (last := fork.blocks[-1]) in wanted:
                continue
            if self._only_forks_hold(last):
                self._forks.append(fork)
            else:
                self._others[last].append(fork)

    def pop(self, *, only_seated: bool = False) -> SequenceState | None:
        """The least urgent one that is left; whoever preempts it calls `took`. None when all have been taken."""
        if only_seated or not (self._seated and self._forks):
            ranks = self._seated if only_seated else self._seated or self._forks
        else:
            ranks = max(self._seated, self._forks, key=lambda those: those[-1].urgency)
        return ranks.pop() if ranks else None

    def took(self, victim: SequenceState) -> None:
        """The victim's blocks have been released; it still names them."""
        if victim.phase is Phase.FORKED:
            self._num_forks[victim.blocks[-1]] -= 1
            return
        for block in victim.blocks:
            if block in self._others and self._only_forks_hold(block):
                for fork in self._others.pop(block):
                    bisect.insort(self._forks, fork, key=urgency_of)

    def _only_forks_hold(self, block: BlockId) -> bool:
        return self._num_forks[block] == self._pool.num_references(block)
