"""Whoever knows where workers are, as the test has it."""

from collections.abc import Sequence

from common.errors import UnavailableError


class FakeResolver:
    """Answers with `addresses`, or fails while `failure` is set."""

    def __init__(self, *addresses: str) -> None:
        self.addresses: Sequence[str] = addresses
        self.failure: str | None = None
        self.num_lookups = 0

    async def resolve(self) -> Sequence[str]:
        self.num_lookups += 1
        if self.failure is not None:
            raise UnavailableError(self.failure)
        return self.addresses
