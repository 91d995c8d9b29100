"""Wire forms of routing rows. `npy2base64` is the only place where an array becomes text."""

import io
from functools import lru_cache
from tokenize import TokenError

import numpy as np
import numpy.typing as npt
import pybase64

#: What numpy raises of headers that are none, or that promise more than there can be.
_FOREIGN_ERRORS = (ValueError, EOFError, SyntaxError, TypeError, TokenError, OverflowError, MemoryError)


def numpy2base64(array: npt.NDArray[np.generic]) -> str:
    """Base64 (padded, no newlines) of the array's .npy file: `np.save(..., allow_pickle=False)`.

    Args:
        array: any shape and any dtype but object; routing rows are C-order [rows, L, K].

    Raises:
        ValueError: the dtype is object.
    """
    contiguous = np.ascontiguousarray(array)
    return npy2base64(contiguous.tobytes(), contiguous.dtype, contiguous.shape)


def npy2base64(data: bytes | memoryview, dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> str:
    """As `numpy2base64`, of an array that is C-order bytes already."""
    return pybase64.b64encode_as_string(b"".join((npy_header(dtype, shape), data)))


#: Shapes of a stream's events are few: rows of one token, of a burst, of a prompt's chunk.
@lru_cache(maxsize=1024)
def npy_header(dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> bytes:
    """What `np.save` writes before the data of a C-order array."""
    if dtype.hasobject:
        raise ValueError("an array of Python objects has no .npy form without pickle")
    buffer = io.BytesIO()
    fields = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(buffer, fields)
    return buffer.getvalue()


def base642numpy(text: str) -> npt.NDArray[np.generic]:
    """The inverse of `numpy2base64`. Raises ValueError on anything but strict base64 of an .npy file."""
    content = io.BytesIO(pybase64.b64decode(text, validate=True))
    try:
        # Not np.load, which takes zip archives, too.
        array: npt.NDArray[np.generic] = np.lib.format.read_array(content, allow_pickle=False)
    except _FOREIGN_ERRORS as error:
        raise ValueError(f"no .npy file: {error!r}") from error
    return array
