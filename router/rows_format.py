"""How an array of routing rows is worded in JSON: vLLM's base64 .npy, prime-rl's object, SkyRL's object."""

from typing import Literal

import numpy as np
import pybase64

from common.routing.codec import numpy2base64
from common.routing.record import RoutingArray
from router.forms import RoutedExperts

RowsForm = Literal["npy", "dict", "skyrl"]

#: SkyRL reads no unsigned type beyond 8 bits.
_SKYRL_DTYPES = (np.dtype(np.uint8), np.dtype(np.int16), np.dtype(np.int32))


def format_rows(rows_TLK: RoutingArray, start: int, form: RowsForm) -> str | RoutedExperts:
    """Rows of positions [start, start + T).

    With "skyrl" the dtype is the smallest of uint8, int16 and int32 that holds the values of this very array; else it
    is the model's.
    """
    if form == "npy":
        return numpy2base64(rows_TLK)
    return payload(rows_TLK.astype(_smallest(rows_TLK)) if form == "skyrl" else rows_TLK, start)


def payload(rows_TLK: RoutingArray, start: int) -> RoutedExperts:
    """The object form, in the array's own dtype."""
    little_endian = np.ascontiguousarray(rows_TLK, rows_TLK.dtype.newbyteorder("<"))
    return RoutedExperts(
        data=pybase64.b64encode_as_string(little_endian.tobytes()),
        shape=list(rows_TLK.shape),
        dtype=rows_TLK.dtype.name,
        start=start,
    )


def _smallest(rows_TLK: RoutingArray) -> np.dtype[np.integer]:
    largest = int(rows_TLK.max(initial=0))
    return next(dtype for dtype in _SKYRL_DTYPES if largest <= np.iinfo(dtype).max)
