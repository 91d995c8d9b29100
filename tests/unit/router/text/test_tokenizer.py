"""Text to ids and back, compared with the tokenizers library."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders

from common.errors import ConfigError, InvalidRequestError
from router.text.tokenizer import load_tokenizer
from tests.unit.router.text import checkpoints
from tests.unit.router.text.conftest import Pair

TEXTS = ["", "hello", " hello  all", "é한👩‍👩‍👧 e\u0301", "a\n\tb\x00", "hello<|im_end|>a", "</s>hello"]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("add_special_tokens", [True, False])
@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_encodes_as_the_library(kind: str, text: str, add_special_tokens: bool, request: pytest.FixtureRequest) -> None:
    pair: Pair = request.getfixturevalue(kind)
    expected = pair.reference.encode(text, add_special_tokens=add_special_tokens).ids
    assert pair.loaded.encode(text, add_special_tokens) == expected
    assert pair.loaded.decode(expected, False) == pair.reference.decode(expected, skip_special_tokens=False)
    assert pair.loaded.decode(expected, True) == pair.reference.decode(expected, skip_special_tokens=True)


def test_a_beginning_of_text_token_is_added_only_on_demand(sentencepiece: Pair) -> None:
    assert sentencepiece.loaded.encode("a", True)[0] == 1
    assert sentencepiece.loaded.encode("a", False)[0] != 1


@given(ids=st.lists(st.integers(0, 420), max_size=40), skip=st.booleans())
def test_any_byte_level_ids_decode_as_the_library_does(byte_level: Pair, ids: list[int], skip: bool) -> None:
    assert byte_level.loaded.decode(ids, skip) == byte_level.reference.decode(ids, skip_special_tokens=skip)


@given(text=st.text(), skip=st.booleans())
def test_any_sentencepiece_text_decodes_as_the_library_does(sentencepiece: Pair, text: str, skip: bool) -> None:
    ids = sentencepiece.reference.encode(text).ids
    assert sentencepiece.loaded.decode(ids, skip) == sentencepiece.reference.decode(ids, skip_special_tokens=skip)


def test_valid_characters_survive_next_to_broken_bytes(sentencepiece: Pair) -> None:
    euro_then_half = [3 + byte for byte in (0xE2, 0x82, 0xAC, 0xE2, 0x82)]
    assert sentencepiece.loaded.decode(euro_then_half, False) == "€\N{REPLACEMENT CHARACTER}"


def test_bytes_of_single_tokens(byte_level: Pair, sentencepiece: Pair) -> None:
    first, second = byte_level.reference.encode("€", add_special_tokens=False).ids[:2]
    assert byte_level.loaded.token_bytes(first) == b"\xe2"
    assert byte_level.loaded.token_bytes(second) == b"\x82"
    assert byte_level.loaded.token_text(first) == "\N{REPLACEMENT CHARACTER}"
    assert byte_level.loaded.token_bytes(2) == b"<|im_end|>"
    assert sentencepiece.loaded.token_bytes(3 + 0xE2) == b"\xe2"
    hello = sentencepiece.loaded.token_id("▁hello")
    assert hello is not None
    assert sentencepiece.loaded.token_text(hello) == " hello"


@pytest.mark.parametrize("token_id", [400, 2**31, 2**63, -1])
def test_ids_that_no_token_has_give_nothing(byte_level: Pair, token_id: int) -> None:
    assert byte_level.loaded.vocab_size == 400
    assert byte_level.loaded.token_bytes(token_id) is None
    assert byte_level.loaded.token_text(token_id) == ""
    assert byte_level.loaded.decode([token_id], False) == ""


def test_special_tokens_are_those_with_a_role_and_those_marked(byte_level: Pair, tmp_path: Path) -> None:
    assert byte_level.loaded.special_ids == {0, 1, 2, 3}
    assert byte_level.loaded.special_tokens == {"eos_token": "<|im_end|>", "pad_token": "<|pad|>"}
    tokenizer = checkpoints.byte_level()
    he = checkpoints.token_id(tokenizer, "he")
    folder = checkpoints.write(tmp_path, tokenizer, {"eos_token": {"content": "he", "special": True}})
    reference = checkpoints.transformers_tokenizer(folder, eos_token="he")
    loaded = checkpoints.load(folder)
    assert he in loaded.special_ids
    assert loaded.decode([he, 40], True) == reference.decode([he, 40], skip_special_tokens=True)
    assert loaded.encode("xhex", True) == reference.encode("xhex")


def test_roles_in_special_tokens_map_give_way_to_the_settings(tmp_path: Path) -> None:
    checkpoints.write(tmp_path, checkpoints.byte_level(), {"eos_token": "<|im_end|>"})
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "<|pad|>", "bos_token": "<|endoftext|>"}')
    assert checkpoints.load(tmp_path).special_tokens == {"eos_token": "<|im_end|>", "bos_token": "<|endoftext|>"}


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "\ude00\ud83d"])
def test_lone_surrogates_are_refused(byte_level: Pair, text: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"suffix holds the lone surrogate U\+D") as caught:
        byte_level.loaded.encode(text, True, param="suffix")
    assert caught.value.param == "suffix"


def test_prompts_are_never_cut_or_padded(tmp_path: Path) -> None:
    tokenizer = checkpoints.byte_level()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    loaded = checkpoints.load(checkpoints.write(tmp_path, tokenizer, {}))
    assert loaded.encode("xyzxyzxyz", True) == checkpoints.byte_level().encode("xyzxyzxyz").ids


def test_threads_share_a_tokenizer(byte_level: Pair) -> None:
    texts = [f"{i} hello " * 200 for i in range(32)]
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda text: byte_level.loaded.encode(text, True), texts))
    assert found == [byte_level.reference.encode(text).ids for text in texts]


def test_a_checkpoint_without_tokenizer_has_none(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path) is None


@pytest.mark.parametrize("content", ["", "[]", '{"model": 5}', "[" * 100_000])
def test_a_broken_tokenizer_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("content", ["{", "5", '{"eos_token": 7}'])
def test_broken_settings_are_named(tmp_path: Path, content: str) -> None:
    checkpoints.write(tmp_path, checkpoints.byte_level(), {})
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json"):
        load_tokenizer(tmp_path)


def test_a_decoder_that_looks_at_neighbours_is_refused(tmp_path: Path) -> None:
    tokenizer = checkpoints.byte_level()
    tokenizer.decoder = decoders.CTC()
    with pytest.raises(ConfigError, match="CTC"):
        load_tokenizer(checkpoints.write(tmp_path, tokenizer, {}))


def test_words_without_a_decoder_are_joined_by_spaces(tmp_path: Path) -> None:
    checkpoints.write(tmp_path, checkpoints.byte_level(), {})
    spec = json.loads((tmp_path / "tokenizer.json").read_text())
    spec["decoder"] = None
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    reference = checkpoints.byte_level()
    ids = [40, 41, 42]
    reference.decoder = None
    assert checkpoints.load(tmp_path).decode(ids, False) == reference.decode(ids)


def test_metaspace_spaces_are_read(tmp_path: Path) -> None:
    tokenizer = checkpoints.sentencepiece()
    tokenizer.decoder = decoders.Metaspace()
    loaded = checkpoints.load(checkpoints.write(tmp_path, tokenizer, {}))
    ids = tokenizer.encode("hello hello a", add_special_tokens=False).ids
    assert loaded.decode(ids, False) == tokenizer.decode(ids) == "hello hello a"
