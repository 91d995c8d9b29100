"""What `moerelay verify` has found: counts per kind of difference, with the first example of each."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Difference:
    """`kind` is the field that differs; `detail` shows where, and both values."""

    kind: str
    detail: str


@dataclass(slots=True)
class _Kind:
    count: int
    request: int
    detail: str


class Findings:
    """Collects differences in whatever order the requests end."""

    def __init__(self) -> None:
        self._kinds: dict[str, _Kind] = {}

    def add(self, request: int, differences: Iterable[Difference]) -> None:
        for difference in differences:
            kind = self._kinds.setdefault(difference.kind, _Kind(0, request, difference.detail))
            kind.count += 1
            if request < kind.request:
                kind.request, kind.detail = request, difference.detail

    @property
    def total(self) -> int:
        return sum(kind.count for kind in self._kinds.values())

    def lines(self) -> Iterator[str]:
        for name, kind in sorted(self._kinds.items()):
            yield f"{name}: {count_of(kind.count, 'difference')}, first in request {kind.request}: {kind.detail}"


def count_of(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
