"""Memory that runs out while the engine copies or prepares KV: it ends the request that asked, and nobody else."""

import structlog

from common.engine.sequence import SequenceState
from common.errors import InternalError, MoerelayError

_log = structlog.get_logger(__name__)

#: What torch and NumPy raise when memory is out, on the host or on a device.
OUT_OF_MEMORY = (RuntimeError, MemoryError)

#: A sequence whose request has to end in this error.
Failure = tuple[SequenceState, MoerelayError]


def memory_failure(sequence: SequenceState, what: str, remedy: str, error: Exception) -> Failure:
    """`what` failed for the sequence, and `remedy` leaves more room for it."""
    _log.error("KV memory failed", request=sequence.request.request_id, what=what, exc_info=error)
    return sequence, InternalError(f"{what} failed ({type(error).__name__}: {_first_line(error)}); {remedy}")


def _first_line(error: Exception) -> str:
    """Without the advice and the traceback that torch appends."""
    return str(error).partition("\n")[0][:200]
