"""Addresses in a file that a scheduler or a person keeps up to date."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from common.daemon_thread import on_daemon_thread
from common.errors import UnavailableError
from common.setting_types import HostPort
from common.small_file import read_small_file

#: A mount that is silent for so long is said to hang.
READ_TIMEOUT_S = 5.0

_ADDRESS: TypeAdapter[str] = TypeAdapter(HostPort)


class ListedInFile:
    """One HOST:PORT per line; blank lines and those that begin with # do not count. Replace the file in one step."""

    def __init__(
        self, path: Path, read: Callable[[Path], bytes] = read_small_file, timeout_s: float = READ_TIMEOUT_S
    ) -> None:
        self._path = path
        self._read = read
        self._timeout_s = timeout_s
        #: Until it has ended there is no other: a mount that hangs takes one thread, however often it is looked at.
        self._reading: asyncio.Task[bytes] | None = None

    async def resolve(self) -> Sequence[str]:
        try:
            lines = (await self._content()).decode().splitlines()
        except OSError as error:
            raise UnavailableError(f"{self._path} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise UnavailableError(f"{self._path} is not text") from error
        return list(dict.fromkeys(self._address(number, line) for number, line in _meant(lines)))

    async def _content(self) -> bytes:
        """Raises OSError, or UnavailableError if nothing comes."""
        if self._reading is None:
            self._reading = asyncio.create_task(on_daemon_thread(lambda: self._read(self._path), "discovery"))
        await asyncio.wait([self._reading], timeout=self._timeout_s)
        if not self._reading.done():
            raise UnavailableError(
                f"{self._path} cannot be read: no answer for {self._timeout_s:g} s; does its mount hang?"
            )
        reading, self._reading = self._reading, None
        return reading.result()

    def _address(self, number: int, line: str) -> str:
        try:
            return _ADDRESS.validate_python(line)
        except ValidationError as error:
            reason = error.errors()[0]["msg"].removeprefix("Value error, ")
            raise UnavailableError(f"{self._path}, line {number}: {reason}") from error


def _meant(lines: Sequence[str]) -> list[tuple[int, str]]:
    stripped = [(number, line.strip()) for number, line in enumerate(lines, 1)]
    return [(number, line) for number, line in stripped if line and not line.startswith("#")]
