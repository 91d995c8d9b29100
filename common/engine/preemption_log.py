"""What operators read of preemptions: one line now and then, however many there are."""

import time
from collections.abc import Callable

import structlog

from common.engine.preemption import Preemption
from common.engine.stats import EngineStats
from common.engine.swap import SwapSpace

_log = structlog.get_logger(__name__)

#: Between two lines of one kind. Every preemption by itself is logged at level debug.
INTERVAL_S = 10.0


class PreemptionLog:
    """Logs single preemptions at level debug, their totals at level info, and copies beyond the bound as a warning.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, stats: EngineStats, swap: SwapSpace, clock: Callable[[], float] = time.monotonic) -> None:
        self._stats = stats
        self._swap = swap
        self._clock = clock
        self._next_total = self._next_warning = clock()

    def preempted(self, preemption: Preemption) -> None:
        """One sequence has lost its blocks, and whatever it keeps is copied."""
        sequence = preemption.sequence
        _log.debug(
            "preempted",
            request=sequence.request.request_id,
            choice=sequence.choice,
            kind="swapped" if preemption.end else "recomputed",
            tokens=preemption.num_computed,
        )
        now = self._clock()
        if now >= self._next_total:
            self._next_total = now + INTERVAL_S
            _log.info(
                "preemptions",
                swapped=self._stats.preemptions_swapped,
                recomputed=self._stats.preemptions_recomputed,
                swap_bytes_used=self._swap.used_bytes,
            )
        if preemption.exceeds and now >= self._next_warning:
            self._next_warning = now + INTERVAL_S
            _log.warning(
                "swap space exceeded", swap_bytes_used=self._swap.used_bytes, swap_bytes=self._swap.limit_bytes
            )
