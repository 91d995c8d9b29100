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


def balanced(conditions: Sequence[T], number: int) -> list[T]:
    """The order of one round, so that over the rounds each condition follows each other equally often.

    What one leaves behind (memory, a hot processor, threads that still spin) is then not always charged to the same
    other one, as it is in a rotation. With `n` conditions it evens out after `n` rounds, after `2n` if `n` is odd, and
    before that as far as it can (Williams, "Experimental designs balanced for the estimation of residual effects of
    treatments", 1949): round 0 takes turns between both ends, and each later one begins one condition later.
    """
    count = len(conditions)
    both_ends = [count - (at + 1) // 2 if at % 2 else at // 2 for at in range(count)]
    order = [conditions[(place + number) % count] for place in both_ends]
    return order[::-1] if count % 2 and number % 2 else order
