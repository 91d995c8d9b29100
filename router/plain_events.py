"""Events that bring ids and rows and nothing else, as most of most streams do: put together without an encoder."""

import secrets
from collections.abc import Callable

import msgspec

from router.forms import Json

#: Stand for ids and rows in the event that shows what is around them; nobody can guess them.
_MARK_ID, _MARK_ROWS = secrets.randbits(62), secrets.token_hex(16)

#: Words an event with these ids and rows in base64.
WordEvent = Callable[[list[int], str | None], Json]

_encode = msgspec.json.Encoder().encode


class PlainEvents:
    """Of one choice, which differ in their ids and rows alone. What is around them is taken from the dialect's own."""

    def __init__(self, word: WordEvent) -> None:
        self._before, bare = _split(word([_MARK_ID], None), b"[%d]" % _MARK_ID)
        _, rest = _split(word([_MARK_ID], _MARK_ROWS), b"[%d]" % _MARK_ID)
        self._bare = bare
        self._between, self._after = rest.split(_MARK_ROWS.encode())

    def event(self, token_ids: list[int], rows: str | None) -> Json:
        """`rows` is base64."""
        if rows is None:
            return self._before, _encode(token_ids), self._bare
        return self._before, _encode(token_ids), self._between, rows.encode(), self._after


def _split(event: Json, mark: bytes) -> tuple[bytes, bytes]:
    before, after = b"".join(event).split(mark)
    return before, after
