"""Wire forms of routing rows, decoded here with the standard library."""

import base64
import io
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.routing.codec import base642numpy, numpy2base64
from common.routing.record import RoutingLayout, routing_dtype


@pytest.mark.parametrize(
    ("num_experts", "dtype"),
    [(8, "uint8"), (256, "uint8"), (257, "uint16"), (512, "uint16"), (65_536, "uint16"), (65_537, "int32")],
)
def test_dtype_follows_the_model(num_experts: int, dtype: str) -> None:
    assert routing_dtype(num_experts).name == dtype


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32])
def test_base64_of_npy(dtype: type[np.generic]) -> None:
    rows = np.arange(30).reshape(5, 3, 2).astype(dtype)
    text = numpy2base64(rows)
    decoded = np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)
    assert decoded.dtype == rows.dtype
    assert np.array_equal(decoded, rows)
    assert np.array_equal(base642numpy(text), rows)


def test_views_are_written_in_c_order() -> None:
    rows = np.arange(24, dtype=np.uint8).reshape(2, 3, 4).transpose(2, 1, 0)
    decoded = np.load(io.BytesIO(base64.b64decode(numpy2base64(rows))), allow_pickle=False)
    assert decoded.flags.c_contiguous
    assert np.array_equal(decoded, rows)


def test_nothing_is_pickled() -> None:
    with pytest.raises(ValueError, match=r"(?i)object"):
        numpy2base64(np.array([object()]))


def npy(header: bytes) -> bytes:
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no array",
        b"PK\x05\x06" + bytes(18),  # an empty zip archive
        npy(b"{'descr': '|u1', 'fortran_order': False, 'shape': (2, 2)}\n") + bytes(3),
        npy(b"{'descr': '|u1', 'fortran_order': False, 'shape': (1000000000000000,)}\n"),
        npy(b"{'descr': '|u1', 'fortran_order': False, 'shape': (1000000000000000000000000,)}\n"),
        npy(b"{'descr': 7, 'fortran_order': False, 'shape': (2,)}\n"),
        npy(b"((\n"),
    ],
)
def test_what_is_no_array_file(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"^no \.npy file: "):
        base642numpy(base64.b64encode(content).decode())


@given(st.binary(max_size=200), st.booleans())
def test_any_bytes_are_an_array_or_a_value_error(content: bytes, looks_right: bool) -> None:
    with suppress(ValueError):
        array = base642numpy(base64.b64encode(npy(content) if looks_right else content).decode())
        assert isinstance(array, np.ndarray)


def test_bytes_of_the_wrong_size_are_refused() -> None:
    layout = RoutingLayout(num_layers=2, top_k=2, num_experts=8)
    assert layout.from_bytes(bytes(range(8)), 2)[1, 1, 1] == 7
    with pytest.raises(ValueError, match="7 bytes"):
        layout.from_bytes(bytes(7), 2)
