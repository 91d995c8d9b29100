"""Every error as the JSON body that clients expect."""

from aiohttp import web

from common.errors import (
    HTTP_TABLE,
    AuthenticationError,
    InternalError,
    MoerelayError,
    NotFoundError,
    OverloadedError,
    PayloadTooLargeError,
    UnavailableError,
)
from router.response_schemas import (
    ErrorDetail,
    ErrorResponse,
)

#: Seconds after which a refused client may try again: a few heartbeats.
RETRY_AFTER_S = 1

#: How much of a path is repeated to its sender.
MAX_PATH_CHARS = 200

#: How much a message may say; it may hold a number of thousands of digits, or what a chat template says of a message.
MAX_MESSAGE_CHARS = 2000


def status_of(error: MoerelayError) -> tuple[int, str]:
    """HTTP status and error type of the nearest class in HTTP_TABLE."""
    return next(HTTP_TABLE[cls] for cls in type(error).__mro__ if cls in HTTP_TABLE)


#: The class that best fits the `type` of an error body.
_CLASS_BY_TYPE = {kind: cls for cls, (_, kind) in reversed(HTTP_TABLE.items())}


def error_named(kind: str, message: str, param: str | None = None) -> MoerelayError:
    """The inverse of `status_of`, as far as a type names a class."""
    return _CLASS_BY_TYPE.get(kind, InternalError)(message, param=param)


def error_in(body: bytes, whose: str) -> MoerelayError:
    """What an error body says; `whose` it is, for one that is none."""
    try:
        detail = ErrorResponse.model_validate_json(body).error
    except ValueError:
        return InternalError(f"{whose} failed: {body[:MAX_MESSAGE_CHARS].decode(errors='replace')}")
    return error_named(detail.type, detail.message, detail.param)


def error_body(error: MoerelayError) -> bytes:
    """The JSON object that describes `error`."""
    status, kind = status_of(error)
    return _body(status, kind, error.message, error.param)


def error_response(error: MoerelayError) -> web.Response:
    """The HTTP answer to a request that failed before its first byte."""
    status, _ = status_of(error)
    return web.Response(status=status, body=error_body(error), content_type="application/json", headers=_headers(error))


def _headers(error: MoerelayError) -> dict[str, str]:
    if isinstance(error, OverloadedError) and error.retry_after_s is not None:
        return {"Retry-After": str(error.retry_after_s)}
    if isinstance(error, OverloadedError | UnavailableError):
        return {"Retry-After": str(RETRY_AFTER_S)}
    if isinstance(error, AuthenticationError):
        return {"WWW-Authenticate": "Bearer"}
    return {}


def _body(status: int, kind: str, message: str, param: str | None = None) -> bytes:
    said = message if len(message) <= MAX_MESSAGE_CHARS else message[:MAX_MESSAGE_CHARS] + "…"
    detail = ErrorDetail(message=said, type=kind, param=param, code=status)
    return ErrorResponse(error=detail).model_dump_json().encode()


def aiohttp_response(error: web.HTTPException, request: web.BaseRequest) -> web.Response:
    """aiohttp's own refusals (unknown route, wrong method, large body) in our form."""
    if isinstance(error, web.HTTPNotFound):
        return error_response(
            NotFoundError(f"no such route: {request.path[:MAX_PATH_CHARS]}; GET /docs lists the routes")
        )
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return error_response(PayloadTooLargeError("the request body is larger than --max-body-bytes"))
    body = _body(error.status, "MethodNotAllowedError" if error.status == 405 else "BadRequestError", error.reason)
    allow = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else None
    return web.Response(status=error.status, body=body, content_type="application/json", headers=allow)
