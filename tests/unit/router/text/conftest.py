"""Both kinds of tokenizer, as loaded and as the tokenizers library has them."""

from dataclasses import dataclass

import pytest
from tokenizers import Tokenizer as Backend

from router.text.tokenizer import Tokenizer
from tests.unit.router.text import checkpoints


@dataclass(frozen=True)
class Pair:
    """`reference`: the library's own object, never touched by the code under test."""

    loaded: Tokenizer
    reference: Backend


@pytest.fixture(scope="session")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("byte-level")
    checkpoints.write(folder, checkpoints.byte_level(), dict(checkpoints.BYTE_LEVEL_SETTINGS))
    return Pair(checkpoints.load(folder), checkpoints.byte_level())


@pytest.fixture(scope="session")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("sentencepiece")
    checkpoints.write(folder, checkpoints.sentencepiece(), dict(checkpoints.SENTENCEPIECE_SETTINGS))
    return Pair(checkpoints.load(folder), checkpoints.sentencepiece())
