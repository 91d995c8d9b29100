"""One line of a diagnosis."""

from dataclasses import dataclass
from typing import Literal

from common.errors import MoerelayError

#: "bad": what was asked about will not start. "warn": it will, but it could be better.
Verdict = Literal["ok", "warn", "bad"]


@dataclass(frozen=True, slots=True)
class Check:
    """What was looked at, what was found, and how to make it better where it is not good."""

    name: str
    verdict: Verdict
    found: str
    fix: str | None = None

    @classmethod
    def of_error(cls, name: str, error: MoerelayError) -> "Check":
        """A message of ours names the fix itself, behind its last semicolon."""
        found, semicolon, fix = error.message.rpartition("; ")
        return cls(name, "bad", found, fix) if semicolon else cls(name, "bad", error.message)

    @property
    def told(self) -> str:
        """What was found, and the fix."""
        return self.found if self.fix is None else f"{self.found}; {self.fix}"


def amount(num_bytes: int) -> str:
    """'1.5 GiB', or '0.6 MiB'."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
