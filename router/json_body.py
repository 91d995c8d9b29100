"""Request bodies: strict JSON into strict models, and errors that name the field."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec
import structlog
from aiohttp import web
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from common.errors import InvalidRequestError, RequestTimeoutError
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

#: How long a body may take to arrive; set by the application.
BODY_TIMEOUT_S = web.AppKey("body_timeout_s", float)

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
        fields = {field.alias or name: name for name, field in type(model).model_fields.items()}
        for name in raw.keys() - fields.keys():
            if len(self._seen) < MAX_LOGGED_NAMES and name[:64] not in self._seen:
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
    return parse_body(await read_bytes(request), cls, unknown, check)


async def read_bytes(request: web.Request) -> bytes:
    """The body as it is, decompressed. Raises what `read_body` does, but for its content."""
    timeout_s = request.app[BODY_TIMEOUT_S]
    try:
        async with asyncio.timeout(timeout_s):
            return await request.read()
    except TimeoutError:
        raise RequestTimeoutError(f"the body did not arrive within {timeout_s:g} s (--body-timeout-s)") from None
    except web.RequestPayloadError as error:
        if (encoding := request.headers.get("Content-Encoding")) is None:
            raise InvalidRequestError(f"the body cannot be read: {error}") from error
        raise InvalidRequestError(
            f"the body cannot be read as Content-Encoding {encoding[:MAX_PATH_CHARS]}: {error}",
            param="Content-Encoding",
        ) from error


def parse_body(body: bytes, cls: type[ModelT], unknown: UnknownFields, check: Check | None = None) -> ModelT:
    """The pure part of `read_body`."""
    try:
        raw = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise InvalidRequestError("the body must be a JSON object")
    if check is not None:
        check(raw)
    try:
        model = cls.model_validate(raw)
    except ValidationError as error:
        raise invalid(error) from None
    unknown.note(raw, model)
    return model


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
