"""What is sent has the fields, in the order, that the documented models have; and is the same JSON."""

import base64
import io
import json
import math
import struct
import sys
from itertools import pairwise
from types import ModuleType

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from common.routing.record import RoutingLayout
from router import forms, response_schemas
from router.openai import forms as openai_forms
from router.openai import responses
from router.rows import Rows
from router.rows_format import format_rows
from router.sglang import forms as sglang_forms
from router.sglang import response_schemas as sglang_schemas

PAIRS = [(forms, response_schemas), (openai_forms, responses), (sglang_forms, sglang_schemas)]


def twins(made: ModuleType, documented: ModuleType) -> list[tuple[type[msgspec.Struct], type[BaseModel]]]:
    """Structs and the models of the same names."""
    structs = [each for each in vars(made).values() if isinstance(each, type) and issubclass(each, msgspec.Struct)]
    own = [each for each in structs if each.__module__ == made.__name__ and not each.__name__.startswith("_")]
    return [(each, getattr(documented, each.__name__)) for each in own if each is not forms.Form]


@pytest.mark.parametrize(
    ("made", "documented"), [pair for modules in PAIRS for pair in twins(*modules)], ids=lambda each: each.__name__
)
def test_fields_and_their_order(made: type[msgspec.Struct], documented: type[BaseModel]) -> None:
    assert list(made.__struct_fields__) == list(documented.model_fields)


def test_every_module_has_twins() -> None:
    assert [len(twins(*modules)) > 3 for modules in PAIRS] == [True, True, False]
    assert len(twins(sglang_forms, sglang_schemas)) == 3


fp32 = st.integers(0, 2**32 - 1).map(lambda bits: struct.unpack("<f", struct.pack("<I", bits))[0])


@given(st.lists(fp32.filter(lambda value: math.isfinite(value) and abs(value) < 1e16)), st.text())
def test_numbers_and_texts_as_pydantic_writes_them(numbers: list[float], text: str) -> None:
    """Beyond 1e16, where no logprob is, the exponent has no plus sign."""

    class Documented(BaseModel):
        numbers: list[float]
        text: str

    class Made(forms.Form, frozen=True):
        numbers: list[float]
        text: str

    expected = Documented(numbers=numbers, text=text).model_dump_json().encode()
    assert forms.to_json(Made(numbers, text)) == (expected,)


def test_large_texts_are_in_their_places() -> None:
    """And are the objects that were given: they are not copied."""
    first, second = b"A" * 10, b"B" * 20
    small = forms.RoutedExperts("small", [1], "uint8", 0)
    made = [
        forms.RoutedExperts(forms.LargeText(first), [1], "uint8", 0),
        small,
        forms.RoutedExperts(forms.LargeText(second), [2], "uint8", 3),
    ]
    parts = forms.to_json([*made])
    assert json.loads(b"".join(parts)) == [
        {"data": "A" * 10, "shape": [1], "dtype": "uint8", "start": 0},
        {"data": "small", "shape": [1], "dtype": "uint8", "start": 0},
        {"data": "B" * 20, "shape": [2], "dtype": "uint8", "start": 3},
    ]
    assert [part for part in parts if part is first or part is second] == [first, second]


def test_an_answer_that_cannot_be_encoded_leaves_nothing_behind() -> None:
    """Neither the memory of its large texts, nor those texts in the next answer."""
    text = bytes(1000)
    num_holders = sys.getrefcount(text)
    broken = forms.RoutedExperts(forms.LargeText(text), [1], "\ud800", 0)
    with pytest.raises(UnicodeEncodeError):
        forms.to_json(broken)
    del broken
    assert sys.getrefcount(text) == num_holders
    parts = forms.to_json(forms.RoutedExperts(forms.LargeText(b"B" * 10), [1], "uint8", 0))
    assert json.loads(b"".join(parts))["data"] == "B" * 10


@pytest.mark.parametrize("num_rows", [0, 1, 1364, 1366, 3000])
@pytest.mark.parametrize(("dtype", "num_experts"), [("uint8", 256), ("uint16", 257), ("int32", 65_537)])
@pytest.mark.parametrize("cuts", [(), (0, 1), (5, 7)])
def test_rows_are_the_bytes_that_numpy_saves(
    num_rows: int, dtype: str, num_experts: int, cuts: tuple[int, ...]
) -> None:
    """However many parts they come in, and on both sides of the size from which they are encoded in another way."""
    rows_TLK = np.arange(num_rows * 48 * 8).reshape(num_rows, 48, 8).astype(dtype)
    file = io.BytesIO()
    np.save(file, rows_TLK)
    ends = [0, *(min(cut, num_rows) for cut in cuts), num_rows]
    parts = [rows_TLK[first:end].tobytes() for first, end in pairwise(ends)]
    rows = Rows(RoutingLayout(48, 8, num_experts), num_rows, parts)
    for form, expected in ("npy", file.getvalue()), ("dict", rows_TLK.tobytes()):
        made = format_rows(rows, 0, "npy" if form == "npy" else "dict")
        text = made.data if isinstance(made, forms.RoutedExperts) else made
        data = text.text if isinstance(text, forms.LargeText) else text.encode()
        assert base64.b64decode(data, validate=True) == expected
