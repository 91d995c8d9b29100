"""The checkpoints that `moerelay make-model` writes can chat, and transformers reads them the same way."""

from pathlib import Path
from typing import cast

import pytest
from transformers import AutoTokenizer

from common.model.tokenizer_training import write_tokenizer
from router.text.chat import load_chat_template
from router.text.tokenizer import load_tokenizer
from tests.unit.router.text.checkpoints import Reference

TURNS: list[dict[str, object]] = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "é 한?"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("synthetic")
    write_tokenizer(out, 512, 2048)
    return out


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return cast(Reference, AutoTokenizer.from_pretrained(str(folder)))


@pytest.mark.parametrize("text", ["", "Hello, world!", " é 한 👩‍👩‍👧\n", "<|im_start|>user<|im_end|><|endoftext|>"])
def test_transformers_encodes_and_decodes_alike(folder: Path, reference: Reference, text: str) -> None:
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    ids = tokenizer.encode(text, True)
    assert ids == tokenizer.encode(text, False) == reference.encode(text)
    for skip in (True, False):
        assert tokenizer.decode(ids, skip) == reference.decode(ids, skip_special_tokens=skip)


def test_special_tokens_have_their_roles(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    assert {role: tokenizer.token_id(token) for role, token in tokenizer.special_tokens.items()} == {
        "bos_token": 0,
        "eos_token": 2,
        "pad_token": 3,
    }
    assert tokenizer.special_ids == {0, 1, 2, 3}


def test_the_chat_template_renders(folder: Path, reference: Reference) -> None:
    chat = load_chat_template(folder, None, {"eos_token": "<|im_end|>"})
    assert chat is not None
    found = chat.render(TURNS)
    assert found == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\né 한?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert found == reference.apply_chat_template(TURNS, tokenize=False, add_generation_prompt=True)
