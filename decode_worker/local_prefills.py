"""Counts the prompts that a decode worker computed itself, by why it did."""

from enum import StrEnum
from functools import partial

import structlog

from common.engine.request import RequestId
from common.worker.metrics import WorkerMetrics

log = structlog.get_logger()


class Cause(StrEnum):
    """Why a prompt was computed where it is decoded; the values are those of the metric's label."""

    #: Little of it was missing from the prefix cache (`--local-prefill-max-tokens`).
    SHORT_PROMPT = "short_prompt"
    #: A router had no prefill worker and sent all of it here (`--allow-aggregated-fallback`).
    WHOLE_REQUEST = "whole_request"


class LocalPrefills:
    """Totals since the start."""

    def __init__(self) -> None:
        self._numbers = dict.fromkeys(Cause, 0)

    def count(self, cause: Cause, request_id: RequestId, num_tokens: int, num_cached: int) -> None:
        """One more; of its `num_tokens` the prefix cache was seen to hold `num_cached`."""
        self._numbers[cause] += 1
        log.debug(
            "local_prefill", request_id=request_id, cause=cause.value, num_tokens=num_tokens, num_cached=num_cached
        )

    def number(self, cause: Cause) -> int:
        return self._numbers[cause]

    def register(self, metrics: WorkerMetrics) -> None:
        """Shows the totals on `metrics`."""
        readings = {cause.value: partial(self.number, cause) for cause in Cause}
        metrics.counters("local_prefills", "Prompts computed here for want of a handoff.", "cause", readings)
