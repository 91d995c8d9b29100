"""What is to be placed, and among whom."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import xxhash


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker as placement sees it.

    Attributes:
        key: names one start of one worker, in every router the same: a worker that was restarted has nothing cached.
        load: choices that it serves or that wait there.
    """

    key: str
    load: int


class Subject:
    """One prompt. What policies tell prompts apart by is computed when the first of them asks.

    Attributes:
        token_ids: the prompt.
        session: what the client calls the conversation that the prompt belongs to.
    """

    def __init__(
        self, token_ids: Sequence[int] = (), *, block_size: int = 16, salt: str = "", session: str | None = None
    ) -> None:
        self.token_ids = token_ids
        self.session = session
        self._block_size = block_size
        self._salt = salt

    @cached_property
    def digests(self) -> Sequence[int]:
        """Number `i` names the prompt's first `i + 1` full blocks; equal for equal salts and equal tokens.

        Workers cache whole blocks, and at least the last token of a prompt is always computed. The hash need not stand
        up to attacks: a collision costs a cache hit and never an answer, because workers compare tokens.
        """
        num_blocks = max(0, len(self.token_ids) - 1) // self._block_size
        packed = np.asarray(self.token_ids[: num_blocks * self._block_size], "<u4").tobytes()
        width = 4 * self._block_size
        running = xxhash.xxh3_64(self._salt.encode("utf-8", "surrogatepass"))
        digests = []
        for at in range(0, len(packed), width):
            running.update(packed[at : at + width])
            digests.append(running.intdigest())
        return digests

    @cached_property
    def session_digest(self) -> int | None:
        """Names the session; None if the client named none."""
        return None if self.session is None else xxhash.xxh3_64_intdigest(self.session.encode("utf-8", "surrogatepass"))
