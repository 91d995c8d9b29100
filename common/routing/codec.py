"""Wire forms of routing rows. `numpy2base64` is the only place where an array becomes text."""

import io

import numpy as np
import numpy.typing as npt
import pybase64


def numpy2base64(array: npt.NDArray[np.generic]) -> str:
    """Base64 (padded, no newlines) of the array's .npy file: `np.save(..., allow_pickle=False)`.

    Args:
        array: any shape and any dtype but object; routing rows are C-order [rows, L, K].

    Raises:
        ValueError: the dtype is object.
    """
    buffer = io.BytesIO()
    np.save(buffer, np.ascontiguousarray(array), allow_pickle=False)
    return pybase64.b64encode_as_string(buffer.getbuffer())


def base642numpy(text: str) -> npt.NDArray[np.generic]:
    """The inverse of `numpy2base64`. Raises ValueError on anything but strict base64 of an .npy file."""
    array: npt.NDArray[np.generic] = np.load(io.BytesIO(pybase64.b64decode(text, validate=True)), allow_pickle=False)
    return array
