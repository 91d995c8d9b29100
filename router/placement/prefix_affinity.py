"""Prefix affinity: a prompt goes where its beginning is cached already, unless that worker has too much to do."""

from collections.abc import Sequence

from router.placement.least_loaded import LeastLoaded
from router.placement.prefix_memory import MAX_PREFIXES, PrefixMemory
from router.placement.rendezvous import highest, within_bound
from router.placement.subject import Candidate, Subject

#: How much more than the mean a worker may get because it has a prefix: a quarter, as for KubeAI and HAProxy.
EXCESS = 0.25

#: Blocks that decide where a new prompt goes. More than a common system prompt has, so that not everything goes to one
#: worker; fewer than a document that several prompts ask about.
ROOT_BLOCKS = 32


class PrefixAffinity:
    """Where nobody has seen the prompt's beginning, rendezvous hashing decides among those with the least to do."""

    def __init__(self, max_prefixes: int = MAX_PREFIXES) -> None:
        self._memory = PrefixMemory(max_prefixes)
        self._least_loaded = LeastLoaded()

    def choose(self, candidates: Sequence[Candidate], subject: Subject) -> str:
        if not subject.digests:
            return self._least_loaded.choose(candidates, subject)
        key = self._known(candidates, subject) or self._new(candidates, subject)
        self._memory.remember(subject.digests, key)
        return key

    def _known(self, candidates: Sequence[Candidate], subject: Subject) -> str | None:
        free = {candidate.key: candidate for candidate in within_bound(candidates, EXCESS)}
        found = self._memory.longest(subject.digests, free.keys())
        return min(found, key=lambda key: free[key].load) if found else None

    def _new(self, candidates: Sequence[Candidate], subject: Subject) -> str:
        root = subject.digests[min(ROOT_BLOCKS, len(subject.digests)) - 1]
        return highest(within_bound(candidates, 0.0), root).key
