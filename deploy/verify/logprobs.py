"""Logprobs as the API writes them, compared by their bits."""

import math
from collections.abc import Sequence

import numpy as np

from common.prompt_logprobs import PromptLogprobs
from common.sampling import SampledToken, TokenLogprob
from deploy.client import Json

#: How the API writes a logprob that is not finite.
_NOT_FINITE = -9999.0

#: Id, bits of the float32 in hex digits, rank.
Entry = tuple[int, str, int]


def told(content: Sequence[Json]) -> list[tuple[Entry, ...]]:
    """Entries of `logprobs.content`: per token its own and its alternatives."""
    return [(_entry(token), *map(_entry, token["top_logprobs"])) for token in content]


def expected(tokens: Sequence[SampledToken]) -> list[tuple[Entry, ...]]:
    """What the API must tell of them: the token itself leads its alternatives."""
    return [(_own(token), _own(token), *_others(token)) for token in tokens]


def told_of_prompt(positions: Sequence[Json | None]) -> list[tuple[Entry, ...] | None]:
    """`prompt_logprobs`: per position an object from ids to entries, null for the first."""
    return [
        None if entries is None else tuple(_entry({**entry, "token_id": int(key)}) for key, entry in entries.items())
        for entries in positions
    ]


def expected_of_prompt(scores: PromptLogprobs) -> list[tuple[Entry, ...] | None]:
    """The prompt's own token, then the best; one entry for each id."""
    return [None, *(tuple(dict.fromkeys(_packed(*entry) for entry in row)) for row in scores[1:].tolist())]


def _entry(wire: Json) -> Entry:
    return wire["token_id"], _hex(wire["logprob"]), wire["rank"]


def _own(token: SampledToken) -> Entry:
    assert token.logprob is not None, "logprobs were asked for"
    return _value(token.logprob)


def _others(token: SampledToken) -> list[Entry]:
    return [_value(other) for other in token.top if other.token_id != token.token_id]


def _value(value: TokenLogprob) -> Entry:
    return _packed(value.token_id, value.logprob, value.rank)


def _packed(token_id: int, logprob: float, rank: int) -> Entry:
    return token_id, _hex(logprob if math.isfinite(logprob) else _NOT_FINITE), rank


def _hex(value: float) -> str:
    return np.float32(value).tobytes().hex()
