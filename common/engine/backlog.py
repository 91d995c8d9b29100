"""What stands between a prompt that comes now and its first token."""

from typing import NamedTuple


class Backlog(NamedTuple):
    """As the engine thread saw it after its last step; replaced, never changed, so any thread may read it."""

    #: Prompt tokens, of sequences that have a seat, that are not computed yet.
    num_tokens: int = 0
    #: Seconds per prompt token at present; None: not measured yet.
    token_s: float | None = None
