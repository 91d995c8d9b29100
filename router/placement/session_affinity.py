"""Session stickiness: all prompts of a session go to one worker, unless that has far too much to do already."""

from collections.abc import Sequence

from router.placement.least_loaded import LeastLoaded
from router.placement.rendezvous import highest, within_bound
from router.placement.subject import Candidate, Subject

#: How much more than the mean a worker may get. Twice as much more as for a prefix: whoever names sessions would rather
#: wait than lose a cache, and several routers do not see the same loads.
EXCESS = 0.5


class SessionAffinity:
    """Rendezvous hashing of the session's name; nothing is remembered, so that several routers agree.

    Prompts without a session go to the least loaded.
    """

    def __init__(self) -> None:
        self._least_loaded = LeastLoaded()

    def choose(self, candidates: Sequence[Candidate], subject: Subject) -> str:
        if subject.session_digest is None:
            return self._least_loaded.choose(candidates, subject)
        return highest(within_bound(candidates, EXCESS), subject.session_digest).key
