"""Text that grows token by token."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from common.errors import CheckpointError
from deploy.text import TextStream, load_tokenizer


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    """One token per byte, as it comes back from disk."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.save(str(tmp_path / "tokenizer.json"))
    return load_tokenizer(tmp_path)


def test_a_character_of_several_tokens_appears_when_it_is_complete(tokenizer: Tokenizer) -> None:
    text, stream = "aé€b", TextStream(tokenizer)
    pieces = [stream.push([token_id]) for token_id in tokenizer.encode(text).ids]
    assert pieces == ["a", "", "é", "", "", "€", "b"]
    assert stream.finish() == ""


def test_a_cut_character_is_shown_at_the_end_as_replacement(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer)
    assert stream.push(tokenizer.encode("a€").ids[:-1]) == "a"
    assert stream.finish().startswith("\N{REPLACEMENT CHARACTER}")


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere/tokenizer\.json does not exist"):
        load_tokenizer(tmp_path / "nowhere")
