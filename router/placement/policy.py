"""What every placement policy can do."""

from collections.abc import Sequence
from typing import Protocol

from router.placement.subject import Candidate, Subject


class Policy(Protocol):
    """Chooses for one side, prefill or decode, and remembers of its choices what it needs."""

    def choose(self, candidates: Sequence[Candidate], subject: Subject) -> str:
        """Key of the candidate that takes the prompt; there is at least one."""
        ...
