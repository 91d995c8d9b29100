"""Addresses in a file that a scheduler or a person keeps up to date."""

from collections.abc import Sequence
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from common.errors import UnavailableError
from common.setting_types import HostPort

_ADDRESS: TypeAdapter[str] = TypeAdapter(HostPort)


class ListedInFile:
    """One HOST:PORT per line; blank lines and those that begin with # do not count. Replace the file in one step."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def resolve(self) -> Sequence[str]:
        try:
            lines = self._path.read_text("utf-8").splitlines()  # local, and small
        except OSError as error:
            raise UnavailableError(f"{self._path} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise UnavailableError(f"{self._path} is not text") from error
        return list(dict.fromkeys(self._address(number, line) for number, line in _meant(lines)))

    def _address(self, number: int, line: str) -> str:
        try:
            return _ADDRESS.validate_python(line)
        except ValidationError as error:
            reason = error.errors()[0]["msg"].removeprefix("Value error, ")
            raise UnavailableError(f"{self._path}, line {number}: {reason}") from error


def _meant(lines: Sequence[str]) -> list[tuple[int, str]]:
    stripped = [(number, line.strip()) for number, line in enumerate(lines, 1)]
    return [(number, line) for number, line in stripped if line and not line.startswith("#")]
