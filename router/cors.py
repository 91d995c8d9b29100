"""Cross-origin requests from browsers (the Fetch standard's CORS protocol): off unless origins are configured."""

from collections.abc import Sequence
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Handler

from common.errors import ConfigError

_ANY = "*"

_PREFLIGHT_HEADERS = {
    "Access-Control-Allow-Methods": "GET, POST, OPTIONS",
    # The star covers the many that client libraries add, but never Authorization, which must be named.
    "Access-Control-Allow-Headers": "Authorization, Content-Type, X-API-Key, X-Request-Id, *",
    # Browsers ask before each request otherwise; Chromium keeps an answer for two hours at most.
    "Access-Control-Max-Age": "7200",
}

_EXPOSED = "X-Request-Id, Retry-After"


class Cors:
    """Which origins may read answers."""

    def __init__(self, origins: Sequence[str]) -> None:
        """Raises ConfigError if one is neither * nor SCHEME://HOST[:PORT]."""
        for origin in origins:
            _check(origin)
        self._origins = frozenset(origins)

    @property
    def enabled(self) -> bool:
        return bool(self._origins)

    def allows(self, origin: str | None) -> bool:
        return origin is not None and (_ANY in self._origins or origin in self._origins)

    def headers(self, origin: str | None) -> dict[str, str]:
        """Of every answer to a request from `origin`."""
        if _ANY in self._origins:
            return {"Access-Control-Allow-Origin": _ANY, "Access-Control-Expose-Headers": _EXPOSED}
        # Also on answers to others, which a cache would else give to everybody.
        vary = {"Vary": "Origin"}
        if origin is None or origin not in self._origins:
            return vary
        return vary | {"Access-Control-Allow-Origin": origin, "Access-Control-Expose-Headers": _EXPOSED}


def _check(origin: str) -> None:
    parts = urlsplit(origin)
    if origin != _ANY and not (parts.scheme and parts.netloc and origin == f"{parts.scheme}://{parts.netloc}"):
        raise ConfigError(f"--cors-origin {origin!r} is not an origin; write SCHEME://HOST[:PORT], or * for any")


CORS = web.AppKey("cors", Cors)


@web.middleware
async def answer_preflights(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Browsers send no key with a preflight, so this comes before keys are asked for."""
    asks = request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers
    if asks and request.app[CORS].allows(request.headers.get("Origin")):
        return web.Response(status=204, headers=_PREFLIGHT_HEADERS)
    return await handler(request)


async def add_cors_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Runs before the headers of any answer go out, errors and streams included."""
    response.headers.update(request.app[CORS].headers(request.headers.get("Origin")))
