"""Server-sent events as the router sends them, from bytes to payloads. No I/O."""

from collections.abc import Iterator

_SEPARATOR = b"\n\n"
_FIELD = b"data:"


class SseDecoder:
    """Cuts a byte stream into the payloads of its `data:` events, however the bytes arrive and however long one is."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, data: bytes) -> Iterator[str]:
        """The payloads that `data` completes. Raises UnicodeDecodeError if one is not UTF-8."""
        # Only the new bytes, and the last old one, can hold a separator: a long event is not searched again and again.
        searched = max(0, len(self._pending) - 1)
        self._pending += data
        start = 0
        while (end := self._pending.find(_SEPARATOR, max(searched, start))) >= 0:
            event = bytes(self._pending[start:end])
            start = end + len(_SEPARATOR)
            if event.startswith(_FIELD):
                yield event.removeprefix(_FIELD).decode().strip()
        del self._pending[:start]

    @property
    def is_empty(self) -> bool:
        """Whether every byte so far belonged to a complete event."""
        return not self._pending
