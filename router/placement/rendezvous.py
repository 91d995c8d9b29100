"""Rendezvous hashing with bounded load: routers that share nothing agree on a worker, and no worker gets too much."""

from collections.abc import Sequence

import xxhash

from router.placement.subject import Candidate


def within_bound(candidates: Sequence[Candidate], excess: float) -> list[Candidate]:
    """Candidates that may take one more: their load then is at most `1 + excess` times the mean, rounded up.

    At least one always may, because not all are above the mean. After Mirrokni, Thorup and Zadimoghaddam, "Consistent
    Hashing with Bounded Loads" (2018).
    """
    total = sum(candidate.load for candidate in candidates) + 1
    bound = -int(-(1 + excess) * total // len(candidates))
    return [candidate for candidate in candidates if candidate.load < bound]


def highest(candidates: Sequence[Candidate], digest: int) -> Candidate:
    """The candidate with the highest weight for this digest.

    One that goes away moves only what it had, and one that comes takes an equal part from everyone. After Thaler and
    Ravishankar, "A Name-Based Mapping Scheme for Rendezvous" (1996).
    """
    return max(candidates, key=lambda candidate: (_weight(candidate.key, digest), candidate.key))


def _weight(key: str, digest: int) -> int:
    return xxhash.xxh3_64_intdigest(key.encode("utf-8", "surrogatepass"), seed=digest)
