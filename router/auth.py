"""API keys: from files, compared in constant time, asked for before a body is read. Never logged."""

import hmac
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from aiohttp import HttpVersion11, web
from aiohttp.typedefs import Handler

from common.errors import AuthenticationError, ConfigError
from common.small_file import read_small_file

#: What load balancers probe; open whatever is configured.
OPEN_PATHS = frozenset({"/live", "/ready", "/health", "/version"})

_BEARER = "bearer "


class KeyRing:
    """Keys of one kind, as they are now."""

    def __init__(self, keys: Iterable[str]) -> None:
        self.replace(keys)

    def replace(self, keys: Iterable[str]) -> None:
        """Takes others instead, from the next request on."""
        self._digests = [_digest(key) for key in keys]

    def accepts(self, key: str) -> bool:
        """Takes the same time whichever key it is, and however much of one is right."""
        digest, found = _digest(key), False
        for known in self._digests:
            found |= hmac.compare_digest(known, digest)
        return found


def _digest(key: str) -> bytes:
    """Of equal length for all keys. aiohttp hands bytes that are not UTF-8 on as surrogates."""
    return sha256(key.encode(errors="surrogateescape")).digest()


def listed_keys(path: Path, flag: str) -> list[str]:
    """One key per line, at least one; blank lines and those that begin with # do not count.

    Raises:
        ConfigError: the file cannot be read, holds no key, or a key could not be sent in a header.
    """
    try:
        lines = read_small_file(path).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"{flag} {path} cannot be read: {reason}") from error
    stripped = [(number, line.strip()) for number, line in enumerate(lines, 1)]
    keys = [(number, line) for number, line in stripped if line and not line.startswith("#")]
    for number, key in keys:
        if not key.isascii() or not key.isprintable() or " " in key:
            raise ConfigError(f"{flag} {path}, line {number}: a key is visible ASCII characters without spaces")
    if not keys:
        raise ConfigError(f"{flag} {path} holds no key; write one per line, or leave the flag out")
    return [key for _, key in keys]


@dataclass(frozen=True, slots=True)
class Guard:
    """Which keys open which routes; None: no key is needed. `admin_paths` are routes for administrators only,
    `shared_paths` are for them, too.

    `refuses_pages`: without keys, a browser must not come on behalf of a web page. Loopback does not keep out pages
    that the administrator visits, and a plain form can POST.
    """

    keys: KeyRing | None
    admin_keys: KeyRing | None = None
    admin_paths: frozenset[str] = frozenset()
    shared_paths: frozenset[str] = frozenset()
    refuses_pages: bool = False

    def check(self, request: web.Request) -> None:
        """Raises AuthenticationError unless the request may go on."""
        resource = request.match_info.route.resource
        # Not the path as sent: a route is protected however its path was spelled.
        path = resource.canonical if resource is not None else None
        keys = self._keys_of(path)
        if keys is not None:
            if not (path in self.shared_paths and self._is_administrator(request)):
                _check_key(request, keys)
        elif self.refuses_pages and path not in OPEN_PATHS and _is_of_page(request):
            raise AuthenticationError("web pages need a key here; start with --admin-key-file")

    def check_administrator(self, request: web.Request, what: str) -> None:
        """For what concerns other clients, too. Raises AuthenticationError; never where clients have no keys."""
        if self.keys is not None and not self._is_administrator(request):
            raise AuthenticationError(f"{what} concerns every client and needs a key of --admin-key-file")

    def _is_administrator(self, request: web.Request) -> bool:
        return self.admin_keys is not None and any(map(self.admin_keys.accepts, _presented(request)))

    def needs_key(self, path: str) -> bool:
        """Whether the route with that path does."""
        return self._keys_of(path) is not None

    def _keys_of(self, path: str | None) -> KeyRing | None:
        if path in OPEN_PATHS:
            return None
        return self.admin_keys if path in self.admin_paths else self.keys


def _is_of_page(request: web.Request) -> bool:
    """Whether a web page sent it: by script or form, or by naming it as the address of an image, say."""
    return "Origin" in request.headers or request.headers.get("Sec-Fetch-Site", "none") != "none"


def _check_key(request: web.Request, keys: KeyRing) -> None:
    presented = _presented(request)
    if not presented:
        raise AuthenticationError("this route needs a key; send it as Authorization: Bearer KEY")
    if not any(keys.accepts(key) for key in presented):
        raise AuthenticationError("the key is not known")


def _presented(request: web.Request) -> list[str]:
    authorization = request.headers.get("Authorization", "")
    keys = [authorization[len(_BEARER) :].strip()] if authorization[: len(_BEARER)].lower() == _BEARER else []
    return [*keys, *request.headers.getall("X-API-Key", [])[:1]]


GUARD = web.AppKey("guard", Guard)


@web.middleware
async def require_key(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuses strangers before their bodies are read."""
    request.app[GUARD].check(request)
    return await handler(request)


async def expect_continue(request: web.Request) -> None:
    """Answers `Expect: 100-continue`, unless the client would send its body in vain: it then gets the error at once.

    Other expectations are ignored, as RFC 9110 section 10.1.1 allows.
    """
    if request.version < HttpVersion11 or request.headers.get("Expect", "").lower() != "100-continue":
        return
    try:
        request.app[GUARD].check(request)
    except AuthenticationError:
        return  # the middleware says so
    if (request.content_length or 0) <= request.client_max_size:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        # Not part of the answer, which aiohttp otherwise believes to have begun.
        request.writer.output_size = 0
