"""How many characters one token can stand for, where a tokenizer.json has a bound for it.

A text of more characters than the context times this cannot fit, and need not be encoded to know it. That is sound only
if nothing of a text can vanish before it becomes tokens, and no token can swallow any number of characters. So there is
no bound for tokenizers that strip or drop text (`Strip`, `Precompiled`, patterns with behaviour "Removed", added tokens
that take the spaces around them), or that make one unknown token of a whole run.
"""

from collections.abc import Iterable, Mapping

from tokenizers import Tokenizer as Backend
from tokenizers.pre_tokenizers import ByteLevel

#: Characters that become one at most. A composed character has up to four when it is taken apart, and taking apart
#: (NFD, NFKD) never makes fewer of them: no composed form can be shorter than a fourth. Lowercasing never makes fewer.
_NORMALIZERS = {"NFC": 4, "NFKC": 4, "NFD": 1, "NFKD": 1, "Lowercase": 1, "Prepend": 1, "ByteLevel": 1}
_KEEPING_PRE_TOKENIZERS = ("ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "Punctuation", "Split")
_NUM_BYTES = 256


def max_token_chars(spec: Mapping[str, object], backend: Backend) -> int | None:
    """Characters of a text that one token covers at most; None if there is no bound.

    `spec`: the tokenizer.json that `backend` was made of. Special tokens count too.
    """
    shrinking = _normalizer_factor(spec.get("normalizer"))
    added = backend.get_added_tokens_decoder().values()
    if shrinking is None or any(token.lstrip or token.rstrip for token in added):
        return None
    pre_tokenizers = list(_steps(spec.get("pre_tokenizer"), "pretokenizers"))
    if not all(_keeps(step) for step in pre_tokenizers) or not _is_complete(spec, pre_tokenizers):
        return None
    # A piece is at least as long as its text: one character per byte, or more, and marks of a word's end.
    return shrinking * max(map(len, backend.get_vocab(with_added_tokens=True)), default=1)


def _steps(spec: object, parts: str) -> Iterable[Mapping[str, object]]:
    """The steps of a sequence, nested ones included; `parts` is the key that holds them."""
    match spec:
        case {"type": "Sequence", **rest}:
            steps = rest.get(parts)
            for step in steps if isinstance(steps, list) else []:
                yield from _steps(step, parts)
        case dict():
            yield spec


def _normalizer_factor(spec: object) -> int | None:
    """How many characters become one at most; None if any number can."""
    factor = 1
    for step in _steps(spec, "normalizers"):
        match step:
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if new:
                factor *= -(-len(old) // len(new))
            case {"type": str(kind)} if kind in _NORMALIZERS:
                factor *= _NORMALIZERS[kind]
            case _:
                return None
    return factor


def _keeps(pre_tokenizer: Mapping[str, object]) -> bool:
    return pre_tokenizer.get("type") in _KEEPING_PRE_TOKENIZERS and pre_tokenizer.get("behavior") != "Removed"


def _is_complete(spec: Mapping[str, object], pre_tokenizers: Iterable[Mapping[str, object]]) -> bool:
    """Whether every character becomes a token of its own at worst: through its bytes, or as one unknown token each."""
    match spec.get("model"):
        case {"type": "BPE" | "Unigram", "byte_fallback": True, "vocab": dict() | list() as vocab}:
            pieces = {entry[0] if isinstance(entry, list) else entry for entry in vocab}
            return all(f"<0x{byte:02X}>" in pieces for byte in range(_NUM_BYTES))
        case {"type": "BPE", "vocab": dict(pieces)} if any(step.get("type") == "ByteLevel" for step in pre_tokenizers):
            return pieces.keys() >= set(ByteLevel.alphabet())
        case {"type": "BPE", "unk_token": str(), "fuse_unk": False}:
            return True
        case _:
            return False
