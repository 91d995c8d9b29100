"""How long a request that comes now will wait for its first token, as far as its engine can tell. Pure: no clock.

Two views, of which the worse one counts. The prompts ahead of it take as long as steps have taken lately. And where
requests wait for something else, a seat or blocks, the best simple guess is the time for which the first of them has
waited so far (the head-of-line estimator of Ibrahim and Whitt, "Real-time delay estimation based on delay history",
2009). Its clock stands still while the engine does (`Standstill`): a pause does not tell how long others will wait.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from common.engine.backlog import Backlog
from common.engine.request import EngineRequest, Work
from common.errors import OverloadedError

#: Share by which each prompt changes the mean of how much of a prompt is not in the prefix cache.
_NEWS = 0.1


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request without blocks."""

    #: On the clock that stands still with the engine.
    arrived: float
    priority: int
    #: Of its prompt, if it is computed here.
    num_tokens: int

    @classmethod
    def of(cls, request: EngineRequest, now: float) -> "Waiting":
        return cls(now, request.priority, 0 if request.work is Work.DECODE else len(request.prompt))


class Prospect:
    """Refuses requests whose first token is bound to be late; never one that nobody is ahead of.

    Args:
        ttft_s: the objective; None refuses nobody.
    """

    def __init__(self, ttft_s: float | None) -> None:
        self._ttft_s = ttft_s
        #: Set by the engine after every step.
        self.backlog = Backlog()
        #: How much of a prompt has to be computed, lately; 1 before any came in.
        self.uncached_share = 1.0

    @property
    def enabled(self) -> bool:
        return self._ttft_s is not None

    def seated(self, num_prompt: int, num_cached: int) -> None:
        """A prompt has got its blocks; that many of its tokens were in the prefix cache."""
        self.uncached_share += _NEWS * ((num_prompt - num_cached) / num_prompt - self.uncached_share)

    def check(self, request: EngineRequest, line: Iterable[Waiting], now: float) -> None:
        """Raises OverloadedError, which says when to try again, if its first token would come too late.

        `line`: those that wait; of them only those that come before it count. `now`: on the clock of their arrivals.
        """
        if self._ttft_s is None:
            return
        ahead = [each for each in line if each.priority <= request.priority]
        num_ahead = sum(each.num_tokens for each in ahead)
        own = Waiting.of(request, now).num_tokens
        token_s = self.backlog.token_s or 0.0
        wait_s = 0.0
        if own:
            wait_s = token_s * (self.backlog.num_tokens + self.uncached_share * num_ahead)
        wait_s = max(wait_s, *(now - each.arrived for each in ahead), 0.0)
        predicted_s = wait_s + token_s * self.uncached_share * own
        if wait_s and predicted_s > self._ttft_s:
            raise _refusal(predicted_s, self._ttft_s, len(ahead))


def _refusal(predicted_s: float, ttft_s: float, num_ahead: int) -> OverloadedError:
    retry_after_s = max(1, math.ceil(predicted_s - ttft_s))
    return OverloadedError(
        f"the first token is predicted after {predicted_s:.2f} s, later than the {ttft_s:g} s of --slo-ttft, with "
        f"{num_ahead} requests waiting ahead; retry in {retry_after_s} s",
        retry_after_s=retry_after_s,
    )
