"""Replays traces in Mooncake's format (kvcache-ai/Mooncake, FAST25-release/traces): a JSON object per line.

`timestamp` is in milliseconds; `hash_ids` names the prompt's blocks of 512 tokens, of which the last may be shorter.
Requests that have a block's id in common have everything up to its end in common. The texts are not published; each
block is made of ids that its hash id alone decides, so that the prefix caches see what they saw then.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import msgspec

from common.errors import ConfigError
from deploy.load.stream import Ask

BLOCK_TOKENS = 512


class TraceLine(msgspec.Struct, frozen=True):
    """One request as it was recorded."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TracedAsk:
    """A request, `at_s` seconds after the first one."""

    at_s: float
    ask: Ask
    #: Its prompt or its output was longer than the context allows.
    is_cut: bool


def read_trace(path: Path, max_requests: int | None = None) -> list[TraceLine]:
    """In order of time. Raises ConfigError that names the line that is none."""
    try:
        with path.open("rb") as file:
            lines = [_line(path, number, text) for number, text in enumerate(islice(file, max_requests), start=1)]
    except OSError as error:
        raise ConfigError(f"--trace {path}: {error.strerror}") from error
    if not lines:
        raise ConfigError(f"--trace {path} has no request in it")
    return sorted(lines, key=lambda line: line.timestamp)


def _line(path: Path, number: int, text: bytes) -> TraceLine:
    try:
        line = msgspec.json.decode(text, type=TraceLine)
    except msgspec.DecodeError as error:
        raise ConfigError(f"--trace {path}, line {number}: {error}") from error
    num_blocks = -(-line.input_length // BLOCK_TOKENS)
    if line.input_length < 1 or line.output_length < 1 or len(line.hash_ids) != num_blocks:
        raise ConfigError(
            f"--trace {path}, line {number}: {line.input_length} tokens have {num_blocks} blocks of {BLOCK_TOKENS}, "
            f"not {len(line.hash_ids)}, and prompt and output have at least one token"
        )
    return line


def asks(lines: list[TraceLine], vocab_size: int, max_model_len: int, speed: float = 1.0) -> Iterator[TracedAsk]:
    """The requests, `speed` times as fast as recorded; what exceeds the context is cut, the prompt at its end."""
    for line in lines:
        output = min(line.output_length, max_model_len - 1)
        length = min(line.input_length, max_model_len - output)
        is_cut = (length, output) != (line.input_length, line.output_length)
        ask = Ask(tuple(_prompt(line, length, vocab_size)), output)
        yield TracedAsk((line.timestamp - lines[0].timestamp) / 1000 / speed, ask, is_cut)


def _prompt(line: TraceLine, length: int, vocab_size: int) -> Iterator[int]:
    for index, hash_id in enumerate(line.hash_ids):
        rng = random.Random(hash_id)
        for _ in range(min(BLOCK_TOKENS, length - index * BLOCK_TOKENS)):
            yield rng.randrange(vocab_size)
