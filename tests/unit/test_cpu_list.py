"""Lists of cpus as Linux writes them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.cpu_list import format_cpus, parse_cpus


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("0", (0,)), ("0-3,8", (0, 1, 2, 3, 8)), ("8, 0-1", (0, 1, 8)), ("5-5", (5,)), ("10-12,2", (2, 10, 11, 12))],
)
def test_lists_are_read(text: str, cpus: tuple[int, ...]) -> None:
    assert parse_cpus(text) == cpus


@pytest.mark.parametrize("text", ["", "a", "3-1", "1,,2", "-1", "0-", "0-9999999999", "0x3", "1;2", "0-3:2", "²"])
def test_what_is_no_list_is_refused_and_quoted(text: str) -> None:
    with pytest.raises(ValueError, match="is not a list of cpus") as caught:
        parse_cpus(text)
    assert repr(text) in str(caught.value)


def test_a_cpu_named_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="'0-3,2' names a cpu twice"):
        parse_cpus("0-3,2")


@pytest.mark.parametrize(("cpus", "text"), [((), ""), ((3,), "3"), ((0, 1), "0-1"), ((8, 0, 2, 1), "0-2,8")])
def test_lists_are_written(cpus: tuple[int, ...], text: str) -> None:
    assert format_cpus(cpus) == text


@given(st.sets(st.integers(0, 200), min_size=1))
def test_what_is_written_reads_the_same(cpus: set[int]) -> None:
    assert parse_cpus(format_cpus(cpus)) == tuple(sorted(cpus))
