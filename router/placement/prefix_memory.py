"""Which workers have seen which prefixes lately; bounded, whatever is asked."""

from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from itertools import islice

#: Prefixes that are remembered, each by at most a dozen per prompt: those of some ten thousand prompts, in some 20 MB.
MAX_PREFIXES = 2**16

#: Workers that are remembered for one prefix. More do not matter: the least loaded of these is as good as any.
MAX_WORKERS = 16


class PrefixMemory:
    """What a router believes about the workers' prefix caches, from where it sent prompts.

    Of a prompt it keeps the prefixes of 1, 2, 4, 8, … blocks and the longest one. So the next turn of a conversation is
    found by the whole prompt before it, and a prompt that shares only its beginning by at least half of what it shares.
    The least recently used are forgotten first.
    """

    def __init__(self, max_prefixes: int = MAX_PREFIXES) -> None:
        self._max_prefixes = max_prefixes
        #: In order of use. A plain dict finds its first entry only behind all that were deleted before it.
        self._workers: OrderedDict[int, tuple[str, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._workers)

    def longest(self, digests: Sequence[int], among: Collection[str]) -> Collection[str]:
        """The workers of `among` that have seen the longest beginning of this prompt; none if nobody saw any."""
        for digest in reversed(digests):
            known = self._workers.get(digest)
            if known and (found := [key for key in known if key in among]):
                return found
        return ()

    def remember(self, digests: Sequence[int], key: str) -> None:
        """The prompt goes to this worker."""
        for digest in _milestones(digests):
            others = (other for other in self._workers.pop(digest, ()) if other != key)
            self._workers[digest] = (key, *islice(others, MAX_WORKERS - 1))
        while len(self._workers) > self._max_prefixes:
            self._workers.popitem(last=False)


def _milestones(digests: Sequence[int]) -> Iterator[int]:
    """The longest last: of what is equally old, it is forgotten last."""
    length = 1
    while length < len(digests):
        yield digests[length - 1]
        length *= 2
    if digests:
        yield digests[-1]
