"""How many requests were checked, what differed, and why others were not checked."""

from enum import StrEnum
from functools import partial

from common.worker.metrics import WorkerMetrics
from decode_worker.self_check.told import Kind


class Skip(StrEnum):
    """Why a request that was drawn was not checked; the values are those of the metric's label."""

    #: As many are recorded, or wait, as may.
    BUSY = "busy"
    #: The client, or a stop string, ended every choice.
    ABORTED = "aborted"
    #: It failed, or its client went away.
    UNFINISHED = "unfinished"
    #: Longer than --self-check-max-tokens.
    TOO_LONG = "too_long"
    #: The weights changed while it ran, or before it was checked.
    WEIGHTS = "weights"
    #: The worker was paused while it was checked.
    PAUSED = "paused"
    #: There was no memory for its KV, or the check itself failed.
    FAILED = "failed"


class Tally:
    """Totals since the start. Each number is counted by one thread only."""

    def __init__(self) -> None:
        self.checked = 0
        self.seconds = 0.0
        self.skipped = dict.fromkeys(Skip, 0)
        self.different = dict.fromkeys(Kind, 0)

    def register(self, metrics: WorkerMetrics) -> None:
        """Shows the totals on `metrics`."""
        metrics.counter("self_check_requests", "Finished requests computed again.", lambda: self.checked)
        metrics.counter("self_check_seconds", "Time that this took.", lambda: self.seconds)
        skipped = {cause.value: partial(self.skipped.__getitem__, cause) for cause in Skip}
        metrics.counters("self_check_skipped", "Requests drawn and not checked.", "cause", skipped)
        different = {kind.value: partial(self.different.__getitem__, kind) for kind in Kind}
        metrics.counters("self_check_differences", "What came out differently.", "kind", different)
