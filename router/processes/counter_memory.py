"""Memory in which the processes of one router count: each adds to its own part, and whoever is asked adds up all.

What prometheus_client's multiprocess mode does with files, also for the collectors that it leaves out. A process that
is killed loses nothing that it has counted; the one that replaces it goes on in its part. So no sum ever falls.
"""

import math
import mmap
import os
import struct
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

#: Of one process, several times what a router counts; a multiple of every machine's pages.
PART_BYTES = 1 << 16

#: An entry begins with the bytes of its key, the number of its cells, and the key's CRC-32. All is aligned to a cell.
_HEAD = struct.Struct("=III4x")
_CELL_BYTES = 8


class _Part:
    """Of one process: where it ends, then entries. Each is its head, its key, and its cells, which are doubles."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._end = memory[:_CELL_BYTES].cast("Q")
        self._read_to = _CELL_BYTES
        self._entries: dict[tuple[str, int], memoryview[float]] = {}

    def find(self, key: str, num_cells: int) -> "memoryview[float] | None":
        """None if the process has not added it yet, or, being of another version, has something else there."""
        while self._read_to < self._end[0]:
            key_bytes, num, checksum = _HEAD.unpack_from(self._memory, self._read_to)
            begin = self._read_to + _HEAD.size
            cells = begin + key_bytes
            name = bytes(self._memory[begin:cells])
            if not name or zlib.crc32(name) != checksum:
                # Some processors show the new end before what was written ahead of it; it is there at the next look.
                break
            self._read_to = cells + num * _CELL_BYTES
            self._entries[name.rstrip(b"\0").decode(), num] = self._memory[cells : self._read_to].cast("d")
        return self._entries.get((key, num_cells))

    def add(self, key: str, num_cells: int) -> "memoryview[float]":
        """Cells of the process's own part: those of a predecessor, if there are, else new ones, which are 0."""
        if (known := self.find(key, num_cells)) is not None:
            return known
        name = key.encode()
        name += bytes(-len(name) % _CELL_BYTES)
        entry = _HEAD.pack(len(name), num_cells, zlib.crc32(name)) + name + bytes(num_cells * _CELL_BYTES)
        end = self._read_to + len(entry)
        assert end <= len(self._memory), f"no room for {key}"
        self._memory[self._read_to : end] = entry
        # Last: until then nobody sees it, and a process that dies in between has added nothing.
        self._end[0] = end
        added = self.find(key, num_cells)
        assert added is not None
        return added


class Cells:
    """Counts of one key. `own`: of this process, which one thread writes; each is read and written as a whole."""

    __slots__ = ("_key", "_parts", "own")

    def __init__(self, key: str, own: "memoryview[float]", parts: list[_Part]) -> None:
        self._key = key
        self._parts = parts
        self.own = own

    def totals(self) -> list[float]:
        """Of all processes, also of those that have ended."""
        found = (part.find(self._key, len(self.own)) for part in self._parts)
        # fsum, because a sum that is rounded each time may fall when one of its terms rises.
        return [math.fsum(column) for column in zip(*(cells for cells in found if cells is not None), strict=True)]


class CounterMemory:
    """What process `index` of `count` sees of it."""

    def __init__(self, memory: memoryview, index: int, count: int) -> None:
        self._parts = [_Part(memory[i * PART_BYTES : (i + 1) * PART_BYTES]) for i in range(count)]
        self._own = self._parts[index]

    @classmethod
    def alone(cls) -> Self:
        """Of a router with one process."""
        return cls(memoryview(bytearray(PART_BYTES)), 0, 1)

    @classmethod
    def mapped(cls, fd: int, index: int, count: int) -> Self:
        """Of a descriptor of `counter_file`, which is closed: what is mapped stays."""
        memory = memoryview(mmap.mmap(fd, count * PART_BYTES))
        os.close(fd)
        return cls(memory, index, count)

    def reserve(self, key: str, num_cells: int) -> Cells:
        """The cells under that key, in every process."""
        return Cells(key, self._own.add(key, num_cells), self._parts)


@contextmanager
def counter_file(count: int) -> Iterator[int]:
    """Descriptor of the memory, for processes to inherit; it is gone with the last one that has it."""
    fd = _anonymous_file()
    try:
        os.ftruncate(fd, count * PART_BYTES)
        yield fd
    finally:
        os.close(fd)


def _anonymous_file() -> int:
    """Of no file system where there is such a thing: a page that goes to a disk can hold up whoever counts."""
    try:
        return os.memfd_create("moerelay-counters")
    except (AttributeError, OSError):  # another system, a Python built without it, or a kernel that forbids it
        with tempfile.TemporaryFile() as file:
            return os.dup(file.fileno())
