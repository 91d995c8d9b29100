"""How an array of routing rows is worded in JSON: vLLM's base64 .npy, prime-rl's object, SkyRL's object."""

from typing import Literal

import numpy as np
import numpy.typing as npt
import pybase64

from common.routing.codec import npy2base64, npy_header
from common.routing.record import RoutingArray
from router.forms import LARGE_TEXT_BYTES, Base64, LargeText, RoutedExperts
from router.rows import Rows

RowsForm = Literal["npy", "dict", "skyrl"]

#: SkyRL reads no unsigned type beyond 8 bits.
_SKYRL_DTYPES = (np.dtype(np.uint8), np.dtype(np.int16), np.dtype(np.int32))


def format_rows(rows: Rows, start: int, form: RowsForm) -> Base64 | RoutedExperts:
    """Rows of positions [start, start + T).

    With "skyrl" the dtype is the smallest of uint8, int16 and int32 that holds the values of this very array; else it
    is the model's.
    """
    if form == "npy" and rows.num_bytes < LARGE_TEXT_BYTES:
        return npy2base64(rows.data, rows.layout.wire_dtype, rows.shape)
    rows_TLK = rows.array_TLK
    if form == "npy":
        return _large_npy(rows_TLK)
    return payload(rows_TLK.astype(_smallest(rows_TLK)) if form == "skyrl" else rows_TLK, start)


def payload(rows_TLK: RoutingArray, start: int) -> RoutedExperts:
    """The object form, in the array's own dtype."""
    little_endian = np.ascontiguousarray(rows_TLK, rows_TLK.dtype.newbyteorder("<"))
    return RoutedExperts(
        data=base64_of(little_endian),
        shape=list(rows_TLK.shape),
        dtype=rows_TLK.dtype.name,
        start=start,
    )


def _large_npy(rows_TLK: RoutingArray) -> Base64:
    header = np.frombuffer(npy_header(rows_TLK.dtype, rows_TLK.shape), np.uint8)
    return base64_of(np.concatenate([header, rows_TLK.reshape(-1).view(np.uint8)]))


def base64_of(array: npt.NDArray[np.generic]) -> Base64:
    """Of a C-order array's bytes. numpy and pybase64 let other threads run while they work on what is large."""
    if array.nbytes < LARGE_TEXT_BYTES:
        return pybase64.b64encode_as_string(array.tobytes())
    return LargeText(pybase64.b64encode(array.reshape(-1).view(np.uint8).data))


def _smallest(rows_TLK: RoutingArray) -> np.dtype[np.integer]:
    largest = int(rows_TLK.max(initial=0))
    return next(dtype for dtype in _SKYRL_DTYPES if largest <= np.iinfo(dtype).max)
