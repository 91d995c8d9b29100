"""Stop strings: what is shown when, and where the text is cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.text.stop import StopMatcher, StopStrings


def run(
    tokens: list[str], stops: list[str], *, include: bool = False, min_tokens: int = 0
) -> tuple[list[str], str | None]:
    """What each token shows (and the end, if none matches), and the stop string."""
    matcher = StopMatcher(StopStrings(stops, include=include, min_tokens=min_tokens))
    shown: list[str] = []
    for token in tokens:
        text, stop = matcher.feed(token)
        shown.append(text)
        if stop is not None:
            return shown, stop
    return [*shown, matcher.finish()], None


def naive(tokens: list[str], stops: list[str], include: bool, min_tokens: int) -> tuple[str, str | None, int]:
    """Text, stop string and number of tokens kept, by searching everything again after each token."""
    for count in range(1, len(tokens) + 1):
        before, text = "".join(tokens[: count - 1]), "".join(tokens[:count])
        for stop in stops:
            ends = [i + len(stop) for i in range(len(text)) if text.startswith(stop, i)]
            new = [end for end in ends if end > len(before)]
            if count > min_tokens and new:
                return text[: new[0] if include else new[0] - len(stop)], stop, count
    return "".join(tokens), None, len(tokens)


def test_a_beginning_is_held_back_until_it_is_decided() -> None:
    assert run(["x", "E", "ND", "y"], ["END"]) == (["x", "", ""], "END")
    assert run(["x", "E", "ND", "y"], ["END"], include=True) == (["x", "", "END"], "END")


def test_a_false_start_is_shown() -> None:
    assert run(["x", "EN", "X"], ["END"]) == (["x", "", "ENX", ""], None)
    assert run(["x", "EN"], ["END"]) == (["x", "", "EN"], None)


def test_text_around_the_stop_string_in_one_token() -> None:
    assert run(["aENDb"], ["END"]) == (["a"], "END")
    assert run(["aENDb"], ["END"], include=True) == (["aEND"], "END")


def test_a_stop_string_may_begin_inside_a_failed_one() -> None:
    assert run(list("aabaabaaab"), ["aabaaab"]) == (["", "", "", "", "", "aab", "", "", "", ""], "aabaaab")


def test_the_first_in_the_order_of_the_request_wins_within_a_token() -> None:
    assert run(["abc"], ["bc", "a"]) == (["a"], "bc")
    assert run(["abc"], ["a", "bc"]) == ([""], "a")
    assert run(["a", "bc"], ["bc", "a"]) == ([""], "a")


def test_stop_strings_among_the_first_tokens_do_not_count() -> None:
    assert run(["END", "x", "END"], ["END"], min_tokens=2) == (["END", "x", ""], "END")
    # Begun before the bound, completed after it.
    assert run(["EN", "D"], ["END"], min_tokens=1) == (["", ""], "END")


def test_without_stop_strings_nothing_is_held() -> None:
    assert run(["a", "", "b"], []) == (["a", "", "b", ""], None)


@pytest.mark.parametrize("include", [False, True])
@given(
    tokens=st.lists(st.text("ab", max_size=4), max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=4),
    min_tokens=st.integers(0, 4),
)
def test_equals_a_search_through_everything(
    tokens: list[str], stops: list[str], min_tokens: int, include: bool
) -> None:
    shown, stop = run(tokens, stops, include=include, min_tokens=min_tokens)
    text, expected_stop, kept = naive(tokens, stops, include, min_tokens)
    assert ("".join(shown), stop) == (text, expected_stop)
    if stop is not None:
        assert len(shown) == kept


@given(
    tokens=st.lists(st.text("ab", max_size=4), max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4),
)
def test_everything_that_can_be_shown_is_shown(tokens: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(StopStrings(stops))
    seen = shown = ""
    for token in tokens:
        seen += token
        text, stop = matcher.feed(token)
        shown += text
        if stop is not None:
            return
        held = seen[len(shown) :]
        longest = max((n for s in stops for n in range(len(s)) if seen.endswith(s[:n])), default=0)
        assert len(held) == longest
