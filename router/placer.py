"""Which of the usable workers takes a prompt: the policy of each side, over those that are not set aside."""

import time
from collections.abc import Sequence

from common.setting_types import PlacementName
from router.placement.policies import policy
from router.placement.policy import Policy
from router.placement.subject import Candidate, Subject
from router.worker import Side, Worker


class Placer:
    """Both sides follow the same policy, each with what it remembers for itself: their caches hold other prefixes."""

    def __init__(self, name: PlacementName, *, max_prefixes: int) -> None:
        sides: tuple[Side, ...] = ("prefill", "decode")
        self._policies: dict[Side, Policy] = {side: policy(name, max_prefixes=max_prefixes) for side in sides}

    def choose(self, workers: Sequence[Worker], subject: Subject) -> Worker:
        """One of the workers, of which there is at least one and which are all of one side.

        If all are set aside, any: a breaker takes nobody out of service for whom there is no replacement.
        """
        now = time.monotonic()
        allowed = [worker for worker in workers if worker.breaker.allows(now)] or workers
        by_key = {worker.key: worker for worker in allowed}
        candidates = [Candidate(key, worker.load) for key, worker in by_key.items()]
        chosen = by_key[self._policies[allowed[0].side].choose(candidates, subject)]
        chosen.breaker.taken(now)
        return chosen
