"""Small tokenizers of both kinds in use, written to disk as a checkpoint has them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol, cast

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
from transformers import PreTrainedTokenizerFast

from common.model.tokenizer_training import train_tokenizer
from router.text.tokenizer import Tokenizer as Loaded
from router.text.tokenizer import load_tokenizer

BYTE_LEVEL_SETTINGS: Final = {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|pad|>"}
SENTENCEPIECE_SETTINGS: Final = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}

_MERGES: Final = [("▁", "a"), ("l", "l"), ("h", "e"), ("▁", "he"), ("ll", "o"), ("▁he", "llo"), ("▁", "▁")]


def byte_level(vocab_size: int = 400) -> Tokenizer:
    """As Qwen and GPT models have it."""
    return train_tokenizer(vocab_size)


def sentencepiece() -> Tokenizer:
    """As Llama 2 and Mixtral have it: a space is ▁, characters without a piece are bytes, `<s>` is put in front."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdefghijklmnopqrstuvwxyzé"]
    pieces += ["".join(pair) for pair in _MERGES]
    model = models.BPE(
        {piece: i for i, piece in enumerate(pieces)}, _MERGES, unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in pieces[:3]])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", 1)])
    return tokenizer


def write(folder: Path, tokenizer: Tokenizer, settings: dict[str, object]) -> Path:
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def token_id(tokenizer: Tokenizer, piece: str) -> int:
    found = tokenizer.token_to_id(piece)
    assert found is not None, piece
    return found


def load(folder: Path) -> Loaded:
    loaded = load_tokenizer(folder)
    assert loaded is not None
    return loaded


class Reference(Protocol):
    """What tests use of transformers' tokenizers, which are untyped."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...

    def apply_chat_template(self, conversation: Sequence[Mapping[str, object]], **options: object) -> str: ...


def transformers_tokenizer(folder: Path, **settings: object) -> Reference:
    """The reference implementation's view of the same tokenizer.json."""
    made = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **settings)  # type: ignore[no-untyped-call]
    return cast(Reference, made)
