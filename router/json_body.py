"""Request bodies: strict JSON into strict models, and errors that name the field."""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import structlog
from aiohttp import web
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from common.errors import InvalidRequestError, RequestTimeoutError
from router.content_encoding import unpack
from router.json_cost import costs_more
from router.request_schemas import RequestModel

#: Names of unknown fields that have been logged; bounded, because clients choose them.
MAX_LOGGED_NAMES = 256

#: A path may hold keys that the client chose.
MAX_PATH_CHARS = 200

#: Mistakes that clients of other endpoints make, by field and pydantic's error type.
_HINTS = {
    ("token_ids", "missing"): "this endpoint takes token ids, not text; send the prompt's ids in token_ids",
    ("sampling_params", "missing"): 'send an object, e.g. {"max_tokens": 16}; max_tokens and the like belong into it',
    ("sampling_params", "model_type"): 'send an object, e.g. {"max_tokens": 16}',
}

#: From this size on a body is parsed in a thread: a few milliseconds on the event loop, tens if it is made for it.
THREAD_FROM_BYTES = 256 * 1024

#: Where large bodies are parsed, one after the other. Each step of it stops every other thread, the event loop's too,
#: and with several at once it would wait for a step of each.
_LARGE = ThreadPoolExecutor(1, "large-bodies")


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Set by the application. `timeout_s`: how long a body may take to arrive. `max_values`: see `costs_more`."""

    timeout_s: float
    max_values: int


BODY_LIMITS = web.AppKey("body_limits", BodyLimits)

ModelT = TypeVar("ModelT", bound=RequestModel)

#: Looks at the JSON object as it was sent. Raises InvalidRequestError.
Check = Callable[[Mapping[str, object]], None]

log = structlog.get_logger()


class UnknownFields:
    """Logs each unknown field's name once in the life of the process."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def note(self, raw: dict[str, Any], model: BaseModel) -> None:
        """Compares `raw` with the fields of the model it became, and its nested objects likewise."""
        if len(self._seen) >= MAX_LOGGED_NAMES:
            return
        fields = {field.alias or name: name for name, field in type(model).model_fields.items()}
        for name in raw:
            if name in fields or name[:64] in self._seen:
                continue
            if len(self._seen) >= MAX_LOGGED_NAMES:
                return
            self._seen.add(name[:64])
            log.warning("unknown_field_ignored", field=name[:64], schema=type(model).__name__)
        for key, name in fields.items():
            # A field may be sent in another form than it is kept in.
            if isinstance(inner := getattr(model, name), BaseModel) and isinstance(sent := raw[key], dict):
                self.note(sent, inner)


async def read_body(
    request: web.Request, cls: type[ModelT], unknown: UnknownFields, check: Check | None = None
) -> ModelT:
    """Parses and validates the body. `check` comes before the validation, which takes long for very many parts.

    Raises:
        InvalidRequestError: not JSON (NaN and Infinity are not), a field is wrong, or the encoding is not what it says.
        RequestTimeoutError: it did not arrive in time.
        web.HTTPRequestEntityTooLarge: over the application's limit.
    """
    return await parse_body(request, await read_bytes(request), cls, unknown, check)


async def read_bytes(request: web.Request) -> bytes:
    """The body as it is, decompressed. Raises what `read_body` does, but for its content."""
    timeout_s = request.app[BODY_LIMITS].timeout_s
    try:
        async with asyncio.timeout(timeout_s):
            body = await request.read()
    except TimeoutError:
        raise RequestTimeoutError(f"the body did not arrive within {timeout_s:g} s (--body-timeout-s)") from None
    except web.RequestPayloadError as error:
        raise InvalidRequestError(f"the body cannot be read: {error}") from error
    encoding = request.headers.get("Content-Encoding")
    if encoding is None or not body:
        return body
    # Always in a thread: what little it is says nothing about what it unpacks to.
    return await asyncio.to_thread(unpack, body, encoding, request.client_max_size)


async def parse_body(
    request: web.Request, body: bytes, cls: type[ModelT], unknown: UnknownFields, check: Check | None = None
) -> ModelT:
    """The second half of `read_body`, off the event loop if the body is large."""
    max_values = request.app[BODY_LIMITS].max_values
    if len(body) < THREAD_FROM_BYTES:
        raw, model = _parse(body, cls, max_values, check)
    else:
        loop = asyncio.get_running_loop()
        raw, model = await loop.run_in_executor(_LARGE, _parse, body, cls, max_values, check)
    unknown.note(raw, model)
    return model


def _parse(body: bytes, cls: type[ModelT], max_values: int, check: Check | None) -> tuple[dict[str, Any], ModelT]:
    """The JSON object as it was sent, and what it became.

    What it costs is bounded, because other threads wait for the decoder, and then for the validation.
    """
    if costs_more(body, max_values):
        raise InvalidRequestError(
            f"the body has more than {max_values} values (--max-body-values); ask for less at a time"
        )
    try:
        raw = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise InvalidRequestError("the body must be a JSON object")
    if check is not None:
        check(raw)
    try:
        return raw, cls.model_validate(raw)
    except ValidationError as error:
        raise invalid(error) from None


def invalid(error: ValidationError) -> InvalidRequestError:
    """Names the first field that is wrong."""
    return _invalid(error.errors(include_url=False, include_input=False)[0])


def _invalid(error: ErrorDetails) -> InvalidRequestError:
    """`sampling_params.top_p` is named `top_p`; `token_ids[3]` is named `token_ids`."""
    path = ".".join(str(part) for part in error["loc"])[:MAX_PATH_CHARS]
    if hint := _HINTS.get((path, error["type"])):
        return InvalidRequestError(f"{path}: {hint}", param=path)
    names = [str(part) for part in error["loc"] if part not in ("sampling_params", "stream_options")] or [path]
    return InvalidRequestError(f"{path}: {error['msg']}", param=names[0])
