"""Bodies that clients compressed."""

import zlib

from aiohttp import web

from common.errors import InvalidRequestError

#: zlib's names of the formats: with a gzip header, with zlib's, and with none, which some take for "deflate".
_GZIP, _ZLIB, _BARE = 31, 15, -15

#: The low half of zlib's first byte.
_DEFLATE_METHOD = 8


def unpack(body: bytes, encoding: str, max_bytes: int) -> bytes:
    """The body that `encoding`, a Content-Encoding, has made into this one.

    Raises:
        InvalidRequestError: it is not encoded so, or so nobody encodes here.
        web.HTTPRequestEntityTooLarge: it unpacks to more than `max_bytes`; no more than that is unpacked.
    """
    match encoding.strip().lower():
        case "identity" | "":
            return body
        case "gzip" | "x-gzip":
            window_bits = _GZIP
        case "deflate":
            window_bits = _ZLIB if body[:1] and body[0] & 0xF == _DEFLATE_METHOD else _BARE
        case _:
            raise _refusal(encoding, "send gzip, deflate, or the body as it is")
    reader = zlib.decompressobj(window_bits)
    try:
        # One byte more, which tells a body of that size from a larger one.
        unpacked = reader.decompress(body, max_bytes + 1)
    except zlib.error as error:
        raise _refusal(encoding, str(error)) from error
    if len(unpacked) > max_bytes:
        raise web.HTTPRequestEntityTooLarge(max_bytes)
    if not reader.eof or reader.unused_data:
        raise _refusal(encoding, "it is cut, or followed by something else")
    return unpacked


def _refusal(encoding: str, reason: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"the body cannot be read as Content-Encoding {encoding[:200]}: {reason}", param="Content-Encoding"
    )
