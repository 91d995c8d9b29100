"""What is sent has the fields, in the order, that the documented models have; and is the same JSON."""

import math
import struct
from types import ModuleType

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from router import forms, response_schemas
from router.openai import forms as openai_forms
from router.openai import responses
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
    assert forms.to_json(Made(numbers, text)) == expected
