"""Which worker gets the next choice. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker as placement sees it. `last_used` says when it was last chosen; smaller is longer ago."""

    key: str
    load: int
    last_used: int


def choose(candidates: Sequence[Candidate]) -> str:
    """Key of the least loaded candidate; among equals the one not chosen for longest.

    A fixed tie-break would send every request of a quiet cluster to the same worker.
    """
    return min(candidates, key=lambda candidate: (candidate.load, candidate.last_used)).key
