"""The most characters of a text that one token stands for."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from common.errors import InvalidRequestError
from router.text.token_length import max_token_chars
from tests.unit.router.text import checkpoints
from tests.unit.router.text.conftest import Pair


def bound(tokenizer: Tokenizer) -> int | None:
    return max_token_chars(json.loads(tokenizer.to_str()), tokenizer)


def changed(**parts: Any) -> Tokenizer:
    tokenizer = checkpoints.byte_level()
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return tokenizer


def longest(tokenizer: Tokenizer) -> int:
    return max(map(len, tokenizer.get_vocab()))


def test_special_tokens_count() -> None:
    tokenizer = checkpoints.byte_level()
    tokenizer.add_special_tokens(["<|" + "x" * 96 + "|>"])
    assert bound(tokenizer) == 100


def test_the_bound_of_a_checkpoint(byte_level: Pair, sentencepiece: Pair) -> None:
    assert byte_level.loaded.max_token_chars == longest(byte_level.reference)
    assert sentencepiece.loaded.max_token_chars == len("▁hello")


@given(text=st.text())
@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece", "composed"])
def test_no_text_has_fewer_tokens_than_its_length_says(
    text: str, kind: str, byte_level: Pair, sentencepiece: Pair
) -> None:
    composed = changed(normalizer=normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()]))
    tokenizer = {"byte_level": byte_level.reference, "sentencepiece": sentencepiece.reference, "composed": composed}[
        kind
    ]
    most = bound(tokenizer)
    assert most is not None
    assert len(text) <= most * len(tokenizer.encode(text).ids)


@pytest.mark.parametrize("form", ["NFC", "NFKC"])
def test_composition_shortens_to_a_fourth(form: str) -> None:
    taken_apart = "\N{GREEK SMALL LETTER ALPHA}\u0313\u0300\u0345"
    normalizer = getattr(normalizers, form)()
    assert len(normalizer.normalize_str(taken_apart)) == 1
    tokenizer = changed(normalizer=normalizer)
    assert bound(tokenizer) == 4 * longest(tokenizer)


def test_a_replacement_that_shortens() -> None:
    tokenizer = changed(normalizer=normalizers.Replace("ababa", "xy"))
    assert bound(tokenizer) == 3 * longest(tokenizer)


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": normalizers.Strip()},
        {"normalizer": normalizers.Replace("a", "")},
        {"normalizer": normalizers.Sequence([normalizers.NFC(), normalizers.StripAccents()])},
        {"pre_tokenizer": pre_tokenizers.Whitespace()},
        {"pre_tokenizer": pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()])},
        {"pre_tokenizer": pre_tokenizers.Split(" ", "isolated")},  # characters without a piece are dropped
        {"model": models.WordLevel({"a": 0}, unk_token="a")},
        {"model": models.BPE({"a": 0, "<unk>": 1}, [], unk_token="<unk>", fuse_unk=True), "pre_tokenizer": None},
        {"model": models.Unigram([("<unk>", 0.0), ("a", -1.0)], 0), "pre_tokenizer": None},
        {"model": models.BPE({"a": 0}, [])},  # bytes without a piece are dropped
    ],
)
def test_no_bound_where_text_can_vanish(parts: dict[str, Any]) -> None:
    assert bound(changed(**parts)) is None


@pytest.mark.parametrize("side", ["lstrip", "rstrip"])
def test_no_bound_for_a_token_that_takes_the_spaces_around_it(side: str) -> None:
    tokenizer = checkpoints.byte_level()
    tokenizer.add_special_tokens([AddedToken("<|end|>", **{side: True})])
    assert len(tokenizer.encode(" " * 500 + "<|end|>" + " " * 500).ids) < 600
    assert bound(tokenizer) is None


def test_the_refusal_names_both_numbers(byte_level: Pair) -> None:
    most = byte_level.loaded.max_token_chars
    assert most is not None
    byte_level.loaded.check_fits("a" * (10 * most), 10, param="prompt")
    byte_level.loaded.check_fits("a" * 10**6, None, param="prompt")
    with pytest.raises(InvalidRequestError, match=rf"{10 * most + 1} characters; at most {10 * most} .* 10 tokens"):
        byte_level.loaded.check_fits("a" * (10 * most + 1), 10, param="prompt")


def test_nothing_is_refused_without_a_bound(tmp_path: Path) -> None:
    folder = checkpoints.write(tmp_path, changed(normalizer=normalizers.Strip()), {})
    checkpoints.load(folder).check_fits(" " * 10**6, 10, param="prompt")
