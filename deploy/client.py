"""HTTP client of a running cluster, for the commands. Answers keep their wire form, errors become MoerelayErrors."""

import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from types import TracebackType
from typing import Any, Self

import aiohttp
import numpy as np
import numpy.typing as npt

from common.errors import (
    HTTP_TABLE,
    AuthenticationError,
    InternalError,
    MoerelayError,
    UnavailableError,
    WorkerLostError,
)
from common.routing.codec import base642numpy
from common.routing.record import RoutingArray
from deploy.sse import SseDecoder

Json = dict[str, Any]

GENERATE_PATH = "/inference/v1/generate"

_CLASS_BY_TYPE = {kind: cls for cls, (_, kind) in reversed(HTTP_TABLE.items())}
#: A generation may take long; a peer that does not even accept the connection, or falls silent, is another matter.
_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=300.0)
#: OpenSSL's X509_V_ERR_CERT_HAS_EXPIRED, X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH, and the fix
#: on this side or the other.
_CERTIFICATE_FIXES = {
    10: "have a new one made; a router reads it at once",
    62: "give --url with a name that the certificate has",
    64: "give --url with a name that the certificate has",
}


class ClusterClient:
    """Talks to the router at `url`; at most `max_connections` requests at a time. `api_key` is sent with each."""

    def __init__(self, url: str, max_connections: int = 100, *, api_key: str | None = None) -> None:
        self._url = url
        self._max_connections = max_connections
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._session: aiohttp.ClientSession

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(limit=self._max_connections)
        self._session = aiohttp.ClientSession(connector=connector, timeout=_TIMEOUT, headers=self._headers)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def get(self, path: str) -> Json:
        """A JSON object. Raises MoerelayError."""
        with self._failures():
            async with self._session.get(self._url + path) as response:
                return await _json_of(response)

    async def get_text(self, path: str) -> str:
        """A body that is no JSON. Raises MoerelayError."""
        with self._failures():
            async with self._session.get(self._url + path) as response:
                if response.status != HTTPStatus.OK:
                    await _json_of(response)
                return await response.text()

    async def generate(self, body: Mapping[str, Any]) -> Json:
        """One answer without streaming. Raises MoerelayError, of the class that the router names."""
        with self._failures():
            async with self._session.post(self._url + GENERATE_PATH, json=body) as response:
                return await _json_of(response)

    async def stream(self, body: Mapping[str, Any]) -> AsyncGenerator[Json, None]:
        """The events of one stream, up to [DONE].

        Raises:
            MoerelayError: the router refused the request, or ended the stream in an error.
            WorkerLostError: the stream ended without [DONE].
        """
        with self._failures():
            async with self._session.post(self._url + GENERATE_PATH, json={**body, "stream": True}) as response:
                if response.status != HTTPStatus.OK:
                    await _json_of(response)
                async for payload in _payloads(response.content):
                    event = _object(payload)
                    if "error" in event:
                        raise _error_of(event["error"])
                    yield event

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """Turns aiohttp's errors into ours."""
        try:
            yield
        except AuthenticationError as error:
            if "Authorization" in self._headers:
                raise
            raise AuthenticationError(
                f"{self._url} asks for a key; name the file that has it in --api-key-file"
            ) from error
        except aiohttp.ClientConnectorCertificateError as error:
            code: int = getattr(error.certificate_error, "verify_code", 0)
            fix = _CERTIFICATE_FIXES.get(code, "name its authority in the variable SSL_CERT_FILE")
            raise UnavailableError(
                f"the certificate of {self._url} is not trusted: {error.certificate_error}; {fix}"
            ) from error
        except aiohttp.ClientConnectorSSLError as error:
            raise UnavailableError(
                f"{self._url} speaks no TLS that we do: {error.strerror or error}; is it meant to be http://?"
            ) from error
        except aiohttp.ClientConnectorError as error:
            raise UnavailableError(
                f"nothing answers at {self._url}: {error.strerror or error}; does it run, and is --url right?"
            ) from error
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:  # ValueError: neither JSON nor UTF-8
            # A port for TLS hangs up on whoever sends it plain HTTP.
            is_plain = isinstance(error, aiohttp.ServerDisconnectedError) and self._url.startswith("http://")
            raise WorkerLostError(
                f"the answer of {self._url} broke off: {error or type(error).__name__}"
                + ("; is it meant to be https://?" if is_plain else "")
            ) from error


async def _payloads(content: aiohttp.StreamReader) -> AsyncIterator[str]:
    """Payloads up to [DONE]. aiohttp's own line reader gives up on long lines, so bytes are cut here."""
    decoder = SseDecoder()
    async for data in content.iter_any():
        for payload in decoder.feed(data):
            if payload == "[DONE]":
                return
            yield payload
    raise WorkerLostError("the stream ended without [DONE]")


async def _json_of(response: aiohttp.ClientResponse) -> Json:
    """The body of a 2xx answer; the error of any other."""
    text = await response.text()
    if response.status == HTTPStatus.OK:
        return _object(text)
    try:
        error = _object(text)["error"]
    except (ValueError, KeyError):
        raise InternalError(
            f"HTTP {response.status} from {response.url}, which is no answer of a router: {text[:200]}; is --url right?"
        ) from None
    raise _error_of(error)


def _object(text: str) -> Json:
    """Raises ValueError if it is no JSON object."""
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError(f"{text[:200]} is no JSON object")
    return found


def _error_of(detail: object) -> MoerelayError:
    if not isinstance(detail, dict):
        return InternalError(str(detail))
    cls = _CLASS_BY_TYPE.get(str(detail.get("type")), InternalError)
    return cls(str(detail.get("message")), param=detail.get("param"))


def decode_rows(text: str) -> RoutingArray:
    """The array behind one `routed_experts` value. Raises InternalError if it is not one."""
    try:
        array: Any = base642numpy(text)
    except ValueError as error:
        raise InternalError(f"routed_experts is not base64 of an .npy file: {error}") from error
    if array.ndim != 3:
        raise InternalError(f"routed_experts has shape {array.shape}, not (positions, layers, experts per token)")
    rows: RoutingArray = array
    return rows


def join_rows(arrays: Sequence[npt.NDArray[Any]]) -> RoutingArray:
    """At least one array of rows, one below the other."""
    joined: RoutingArray = np.concatenate(arrays)
    return joined
