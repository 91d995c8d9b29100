"""Only the generated part of a page is replaced."""

import pytest

from benchmarks.markers import replace_between

PAGE = "by hand\n<!-- bench begin -->\nold\n<!-- bench end -->\nby hand, too\n<!-- other begin --><!-- other end -->\n"


def test_what_is_written_by_hand_stays() -> None:
    page = replace_between(PAGE, "bench", "new\n")
    assert page == PAGE.replace("\nold\n", "\n\nnew\n\n")


def test_again_gives_the_same() -> None:
    once = replace_between(PAGE, "bench", "new \\1 $&")
    assert replace_between(once, "bench", "new \\1 $&") == once


@pytest.mark.parametrize(
    "page",
    [
        "no markers",
        "<!-- bench begin -->",
        "<!-- bench end --><!-- bench begin -->",
        "<!-- bench begin --><!-- bench begin --><!-- bench end -->",
    ],
)
def test_a_page_without_one_pair_is_refused(page: str) -> None:
    with pytest.raises(ValueError, match="bench begin"):
        replace_between(page, "bench", "new")
