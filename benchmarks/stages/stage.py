"""What a stage is: something that is measured in rounds, every condition once in each, in turns."""

from collections.abc import Sequence
from typing import Protocol, TypeVar

from benchmarks.table import Samples

T = TypeVar("T")


class Stage(Protocol):
    """One part of the benchmark."""

    @property
    def name(self) -> str: ...

    @property
    def num_rounds(self) -> int: ...

    async def measure(self, number: int) -> Samples:
        """One round: one value of every quantity under every condition.

        Raises:
            RuntimeError, OSError, MoerelayError: a server or command failed; what it measured is lost.
        """
        ...


def rotated(conditions: Sequence[T], number: int) -> list[T]:
    """Another order in each round, so that no condition always follows the same one."""
    first = number % max(len(conditions), 1)
    return [*conditions[first:], *conditions[:first]]
