"""Sets of cpus as Linux tools write them: "0-3,8". Pure text in, numbers out; nothing here asks the machine."""

import re
from collections.abc import Iterable
from itertools import groupby

_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")

#: Far beyond any machine; a range such as 0-9999999999 is a slip of the keyboard and must not be written out.
_MAX_CPU = 2**16


def parse_cpus(text: str) -> tuple[int, ...]:
    """'0-3,8' → (0, 1, 2, 3, 8), ascending.

    Raises:
        ValueError: the text is no such list, or names a cpu twice.
    """
    cpus: list[int] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last or last > _MAX_CPU:
            raise ValueError(f"{text!r} is not a list of cpus; write numbers and ranges, such as 0-3,8")
        cpus += range(first, last + 1)
    if len(set(cpus)) < len(cpus):
        raise ValueError(f"{text!r} names a cpu twice")
    return tuple(sorted(cpus))


def format_cpus(cpus: Iterable[int]) -> str:
    """(0, 1, 2, 3, 8) → '0-3,8'."""
    numbered = enumerate(sorted(cpus))
    runs = ([cpu for _, cpu in run] for _, run in groupby(numbered, lambda pair: pair[1] - pair[0]))
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
