"""The one exception tree, and how each error looks over HTTP; `common.rpc` has the table for gRPC.

MoerelayError
├── RequestError                    the client's request cannot be served as asked
│   ├── InvalidRequestError         400  a field is wrong; `param` names it
│   ├── AuthenticationError         401
│   ├── NotFoundError               404
│   ├── RequestTimeoutError         408  the body did not arrive in time
│   ├── DuplicateRequestError       409
│   ├── ConflictError               409  not in the state that the workers are in
│   └── PayloadTooLargeError        413
├── ServiceError                    the service cannot serve it now
│   ├── OverloadedError             429  a queue is full, or too long
│   ├── UnavailableError            503  no healthy worker, or draining
│   │   ├── NotTakenError           503  a worker drains or is out of reach, and has done nothing for the request
│   │   └── PausedError             503  somebody has paused the cluster
│   ├── WorkerLostError             502  a worker went away during the request
│   ├── HandoffError                502  the handoff broke
│   │   ├── HandoffRefusedError     502  the two sides do not fit, in words
│   │   ├── HandoffCorruptError     502  sizes or checksums do not match
│   │   └── HandoffTimeoutError     504  no progress within the lease
│   └── InternalError               500
│       └── RoutingMissingError     500  a routing row was not recorded
└── StartupError                    the process cannot start; exit code 2
    ├── ConfigError                 a setting is wrong
    └── CheckpointError             the checkpoint is broken or not supported
"""


class MoerelayError(Exception):
    """Base of everything moerelay raises on purpose. `message` is a sentence for the person who can fix it.

    Both texts are always encodable as UTF-8: what a message quotes may hold lone surrogates (JSON can spell them, and
    file names that are not UTF-8 hold them), which neither gRPC nor JSON could carry to the caller.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        self.message = _encodable(message)
        self.param = None if param is None else _encodable(param)
        super().__init__(self.message)


def _encodable(text: str) -> str:
    """With lone surrogates spelled out, as in `\\ud800`."""
    return text.encode("utf-8", "backslashreplace").decode()


class RequestError(MoerelayError):
    """The request cannot be served as asked; the same request will fail again."""


class InvalidRequestError(RequestError):
    """A field has a wrong value; `param` names it."""


class AuthenticationError(RequestError):
    """The API key is missing or unknown."""


class NotFoundError(RequestError):
    """No such route, model or request."""


class RequestTimeoutError(RequestError):
    """The request's body did not arrive in time."""


class DuplicateRequestError(RequestError):
    """A live request has this id already."""


class ConflictError(RequestError):
    """What a control request asks for does not go with the state that the service is in."""


class PayloadTooLargeError(RequestError):
    """The body or a message is larger than the configured limit."""


class ServiceError(MoerelayError):
    """The service cannot serve the request now; the same request may succeed later."""


class OverloadedError(ServiceError):
    """A queue is full, or so long that the request would be served too late.

    `retry_after_s`: when it will probably be shorter; None: nobody knows.
    """

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: int | None = None) -> None:
        super().__init__(message, param=param)
        self.retry_after_s = retry_after_s


class UnavailableError(ServiceError):
    """No healthy worker can take the request."""


class NotTakenError(UnavailableError):
    """A worker drains or cannot be reached; it has done nothing for this request, so that another may."""


class PausedError(UnavailableError):
    """Somebody has paused the cluster, as for new weights; it takes requests again when it is resumed."""


class WorkerLostError(ServiceError):
    """A worker went away while it served the request.

    `unreachable`: it is the worker that was called, because gRPC itself failed; otherwise the called one reports it.
    """

    def __init__(self, message: str, *, param: str | None = None, unreachable: bool = False) -> None:
        super().__init__(message, param=param)
        self.unreachable = unreachable


class HandoffError(ServiceError):
    """KV and rows did not arrive on the decode worker."""


class HandoffRefusedError(HandoffError):
    """Prefill and decode worker do not fit; the message names what differs."""


class HandoffCorruptError(HandoffError):
    """A frame's size, range or checksum is wrong."""


class HandoffTimeoutError(HandoffError):
    """No frame or acknowledgement arrived in time."""


class InternalError(ServiceError):
    """A fault of moerelay itself."""


class RoutingMissingError(InternalError):
    """A routing row was asked for that no forward pass recorded."""


class StartupError(MoerelayError):
    """The process cannot start."""


class ConfigError(StartupError):
    """A setting is wrong or impossible in combination with another."""


class CheckpointError(StartupError):
    """The checkpoint is broken, incomplete or of a kind that is not supported."""


#: Exit code of a process that ends with a StartupError.
STARTUP_EXIT_CODE = 2

#: HTTP status and the `type` of the error body, for every class that can reach a client.
HTTP_TABLE: dict[type[MoerelayError], tuple[int, str]] = {
    InvalidRequestError: (400, "BadRequestError"),
    AuthenticationError: (401, "AuthenticationError"),
    NotFoundError: (404, "NotFoundError"),
    RequestTimeoutError: (408, "RequestTimeoutError"),
    DuplicateRequestError: (409, "ConflictError"),
    ConflictError: (409, "ConflictError"),
    PayloadTooLargeError: (413, "RequestTooLargeError"),
    OverloadedError: (429, "RateLimitError"),
    UnavailableError: (503, "ServiceUnavailableError"),
    NotTakenError: (503, "ServiceUnavailableError"),
    PausedError: (503, "PausedError"),
    WorkerLostError: (502, "WorkerLostError"),
    HandoffError: (502, "HandoffError"),
    HandoffRefusedError: (502, "HandoffRefusedError"),
    HandoffCorruptError: (502, "HandoffCorruptError"),
    HandoffTimeoutError: (504, "HandoffTimeoutError"),
    InternalError: (500, "InternalServerError"),
    RoutingMissingError: (500, "InternalServerError"),
}
