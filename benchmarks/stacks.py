"""What a thread does, from sampled stacks: how much of its time is Python's, and how much computes."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

_THREAD = re.compile(r"^thread \([^)]*\): (?P<name>[^;]*)$")
_MODULE = re.compile(r"\((?P<module>[^()]*)\)$")
#: Waiting for work or for another thread: not part of a step.
_WAITING = ("lock_PyThread_acquire_lock", "select_epoll_poll", "Condition.wait", "Queue.get")


@dataclass(frozen=True, slots=True)
class Shares:
    """Samples of one thread by what it was doing, waiting left out."""

    #: The interpreter, in our code or a library's.
    python: int
    #: torch's bindings, which turn a Python call into an operator's.
    binding: int
    #: Operators, kernels, the C library.
    native: int

    @property
    def total(self) -> int:
        return self.python + self.binding + self.native

    @property
    def python_share(self) -> float:
        """Of interpreter and bindings together: what a step would save if it were one call. 0 without samples."""
        return (self.python + self.binding) / self.total if self.total else 0.0


def shares(lines: Iterable[str], thread: str) -> Shares:
    """Of stacks as py-spy writes them raw with thread names: `frame;frame;… count`, the innermost frame last.

    Raises:
        ValueError: a line has another form.
    """
    found: Counter[str] = Counter()
    for line in lines:
        frames, count = _parse(line)
        named = _THREAD.match(frames[0])
        if named and named["name"] == thread and not _waits(frames):
            found[_kind(frames[-1])] += count
    return Shares(found["python"], found["binding"], found["native"])


def _parse(line: str) -> tuple[list[str], int]:
    stack, _, count = line.rpartition(" ")
    if not stack or not count.isdigit():
        raise ValueError(f"{line[:100]!r} is not a stack and a count")
    return stack.split(";"), int(count)


def _waits(frames: list[str]) -> bool:
    return any(frame.startswith(_WAITING) for frame in frames)


def _kind(frame: str) -> str:
    """Of the innermost frame: `name (file.py:line)` or `symbol (library.so)`."""
    found = _MODULE.search(frame)
    module = found["module"] if found else ""
    if re.search(r"\.py(:\d+)?$", module) or re.match(r"(lib)?python\d", module):
        return "python"
    return "binding" if module.startswith("libtorch_python") else "native"
