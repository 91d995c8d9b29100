"""What a body costs to parse, found without parsing it."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.json_cost import CONTAINER_VALUES, costs_more

#: Full of what must not be mistaken for structure.
SOUP = st.text(st.sampled_from(',:[{]}"\\ a\n'), max_size=20)

VALUES = st.recursive(
    st.none() | st.integers() | SOUP,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(SOUP, inner, max_size=5),
    max_leaves=30,
)


def cost_of(value: Any) -> int:
    """Counted on the parsed object: the commas that must be in its text, its keys, objects and arrays."""
    if not isinstance(value, list | dict):
        return 0
    inner = list(value.values()) if isinstance(value, dict) else value
    keys = len(value) if isinstance(value, dict) else 0
    return max(0, len(inner) - 1) + CONTAINER_VALUES * (1 + keys) + sum(map(cost_of, inner))


@given(VALUES)
def test_strings_cost_nothing(value: Any) -> None:
    text, cost = json.dumps(value).encode(), cost_of(value)
    assert not costs_more(text, cost)
    assert cost == 0 or costs_more(text, cost - 1)


@pytest.mark.parametrize("before", range(12))
@pytest.mark.parametrize("escaped", ['\\"', '\\\\"', '"', '\\\\\\"', '\\n","', "[{,:"])
def test_a_string_may_be_cut_anywhere(before: int, escaped: str) -> None:
    """Long texts are looked at in pieces of 256 KiB."""
    value = ["x" * (2**18 - before) + escaped * 9, [1, 2, 3], "," * 2**18]
    text, cost = json.dumps(value).encode(), cost_of(value)
    assert not costs_more(text, cost)
    assert costs_more(text, cost - 1)


@pytest.mark.parametrize(
    "text",
    [b"", b'"', b"\\", b'"\\', b"," * 10, b'{"a', b'[1,"' + b"\\" * 2**18, b"\xff" * 9],
    ids=lambda t: str(t[:9]),
)
def test_what_is_no_json_is_looked_at_all_the_same(text: bytes) -> None:
    assert not costs_more(text, 100)
    assert costs_more(b"[" * 6 + text, 100)
