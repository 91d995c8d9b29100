"""What one key file is worth, for `moerelay doctor`."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from common.security.key_file import WARN_DAYS, exposed, read_key_file


@dataclass(frozen=True, slots=True)
class Keys:
    """A file for --cluster-key-file."""

    path: str
    cluster: str
    role: str
    generation: int
    #: The last day, and how far it is.
    expires: str
    days_left: int
    #: Who else can read it, in words; None: nobody.
    exposed: str | None

    def advice(self) -> Iterator[str]:
        """What could be better, a sentence each."""
        if self.days_left < WARN_DAYS:
            yield f"{self.path} is good for {self.days_left} days: run `moerelay keys rotate` where it was made"
        if self.exposed is not None:
            yield self.exposed


def inspect(path: Path, now: datetime | None = None) -> Keys:
    """Raises ConfigError if it is no key file."""
    keys = read_key_file(path)
    return Keys(str(path), keys.cluster, keys.role, keys.generation, keys.expires, keys.days_left(now), exposed(path))
