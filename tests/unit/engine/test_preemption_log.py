"""How much is logged of preemptions, and what a copy beyond the bound leaves behind."""

import structlog

from common.engine.preemption import Preemption
from common.engine.preemption_log import PreemptionLog
from common.engine.sequence import SequenceState
from common.engine.stats import EngineStats
from common.engine.swap import SwapSpace
from common.kv.chain import Scope, TokenChain
from common.kv.pool import BlockId
from tests.unit.engine.rig import greedy, make_request


class Bench:
    """A log whose clock stands still unless `now` is set."""

    def __init__(self) -> None:
        self.now = 100.0
        self.stats, self.swap = EngineStats(), SwapSpace(50, kv_token_bytes=16, row_bytes=4)
        self.log = PreemptionLog(self.stats, self.swap, lambda: self.now)

    def preempt(self, end: int, *, exceeds: bool = False) -> list[str]:
        """The levels at which one more was logged."""
        sequence = SequenceState(make_request("a", [5, 6, 7], greedy(2)), 1, TokenChain(Scope(""), 4), 0)
        with structlog.testing.capture_logs() as entries:
            self.log.preempted(Preemption(sequence, (BlockId(1),), end, 3, exceeds))
        self.entries = entries
        return [entry["log_level"] for entry in entries]


def test_a_crowd_of_preemptions_makes_few_lines() -> None:
    bench = Bench()
    assert bench.preempt(3) == ["debug", "info"]
    for _ in range(50):
        assert bench.preempt(0) == ["debug"]
    bench.now += 10
    bench.stats.preemptions_swapped, bench.stats.preemptions_recomputed = 1, 51
    bench.swap.used_bytes = 40
    assert bench.preempt(0) == ["debug", "info"]
    assert bench.entries == [
        {"event": "preempted", "log_level": "debug", "request": "a", "choice": 0, "kind": "recomputed", "tokens": 3},
        {"event": "preemptions", "log_level": "info", "swapped": 1, "recomputed": 51, "swap_bytes_used": 40},
    ]


def test_a_copy_beyond_the_bound_is_warned_of() -> None:
    bench = Bench()
    bench.preempt(3)
    bench.swap.used_bytes = 60
    assert bench.preempt(3, exceeds=True) == ["debug", "warning"]
    assert bench.entries[1] == {
        "event": "swap space exceeded",
        "log_level": "warning",
        "swap_bytes_used": 60,
        "swap_bytes": 50,
    }
    assert bench.preempt(3, exceeds=True) == ["debug"]
    bench.now += 10
    assert bench.preempt(3, exceeds=True) == ["debug", "info", "warning"]
