"""A tokenizer of 300 ids of which a test knows every byte, and how streams of the OpenAI endpoints are read."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from router.openai.responses import ChatCompletionChunk, CompletionStreamResponse
from tests.unit.router.cluster import Cluster, split_events, strict_json

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"

#: 2 ends sequences in the fakes.
SPECIAL = {0: b"<|bos|>", 1: b"<|im_start|>", 2: b"<|im_end|>"}

#: The fakes' tokens go up by 7, so a prompt of [100] is answered with "h", both bytes of "é", "E", "ND" and so on.
SAID = [b"h", b"\xc3", b"\xa9", b"E", b"ND", b"!", b"EN", b"x", b"?"]

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'developer' %}{{ raise_exception('no developers here') }}{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if tools %}{{ tools[0]['function']['name'] }}{% endif %}"
    "{% if shout %}{{ shout }}{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _table() -> dict[int, bytes]:
    """What each id stands for: every byte, and pairs of letters for the rest."""
    table = SPECIAL | {100 + 7 * at: piece for at, piece in enumerate(SAID)}
    single = [bytes([byte]) for byte in range(256) if bytes([byte]) not in table.values()]
    pairs = [bytes(pair) for pair in itertools.product(b"ab", b"abcdefghijklmnopqrstuvwxyz")]
    free = [i for i in range(300) if i not in table]
    return table | dict(zip(free, single + pairs, strict=False))


TABLE = _table()
_ID_OF = {piece: i for i, piece in TABLE.items()}


def ids(text: str) -> list[int]:
    """One id per byte."""
    return [_ID_OF[bytes([byte])] for byte in text.encode()]


def said(token_ids: Sequence[int]) -> str:
    """All ids decoded at once, special ones left out."""
    return b"".join(TABLE[i] for i in token_ids if i not in SPECIAL).decode(errors="replace")


def chat_ids(*turns: tuple[str, str]) -> list[int]:
    """What CHAT_TEMPLATE makes of (role, content), with the beginning of an answer."""
    prompt: list[int] = []
    for role, content in turns:
        prompt += [1, *ids(f"{role}\n{content}"), 2, *ids("\n")]
    return [*prompt, 1, *ids("assistant\n")]


def content_for(start: int) -> str:
    """A user's words after which the fakes' first token is `start`."""
    return next(a + b for a in _LETTERS for b in _LETTERS if sum(chat_ids(("user", a + b))) % 300 == start)


_LETTERS = [chr(code) for code in range(ord("0"), ord("z") + 1)]


def _byte_alphabet() -> dict[int, str]:
    """GPT-2's: printable bytes stand for themselves, the rest for the characters from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + at) for at, byte in enumerate(others)}


def write_tokenizer(folder: Path, *, chat: bool = True) -> str:
    """A folder for `--model`."""
    alphabet = _byte_alphabet()
    vocabulary = {
        piece.decode() if i in SPECIAL else "".join(alphabet[byte] for byte in piece): i for i, piece in TABLE.items()
    }
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.add_special_tokens([AddedToken(piece.decode(), normalized=False) for piece in SPECIAL.values()])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing("<|bos|> $A", "<|bos|> $A $B", [("<|bos|>", 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<|bos|>", "eos_token": "<|im_end|>"} | ({"chat_template": CHAT_TEMPLATE} if chat else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(folder)


async def stream(cluster: Cluster, path: str, body: dict[str, Any], **kwargs: Any) -> list[dict[str, Any]]:
    """The events of a complete stream, checked against their schema."""
    async with cluster.http.post(path, json=body | {"stream": True}, **kwargs) as response:
        assert response.status == 200, await response.text()
        *events, done = split_events(await response.read())
    assert done == b"[DONE]"
    parsed = [strict_json(event.decode()) for event in events]
    for event in parsed:
        (CompletionStreamResponse if path == COMPLETIONS else ChatCompletionChunk).model_validate_json(
            json.dumps(event)
        )
    return parsed


def of_choice(events: list[dict[str, Any]], index: int = 0) -> list[dict[str, Any]]:
    """What the events say about one choice, in order."""
    return [choice for event in events for choice in event["choices"] if choice["index"] == index]


def text_of(choice: dict[str, Any]) -> str:
    """The text of a choice or of an event, on either endpoint."""
    if "text" in choice:
        text = choice["text"]
    else:
        text = choice["delta" if "delta" in choice else "message"]["content"]
    assert isinstance(text, str)
    return text
