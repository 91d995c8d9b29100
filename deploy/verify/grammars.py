"""The few structured outputs that `moerelay verify` asks for, each in three forms that know nothing of one another."""

import json
import re
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

#: Every text of every grammar can be spelled with these.
ALPHABET = frozenset(string.ascii_lowercase + string.digits + '{}":,-')

_REGEX = r"[a-z]{2,8}(-[a-z]{1,6}){0,3}"
_CHOICES = ("yes", "no", "maybe", "not-yet")
_SCHEMA = {
    "type": "object",
    "properties": {"count": {"type": "integer", "minimum": 0, "maximum": 999}, "done": {"type": "boolean"}},
    "required": ["count", "done"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Grammar:
    """`asked` is the request's `structured_outputs`, `compiled` the same for a solo run, in llguidance's JSON form."""

    asked: Mapping[str, Any]
    compiled: str
    #: Whether a text is one that the grammar describes, whole.
    is_complete: Callable[[str], bool]


def _is_object(text: str) -> bool:
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return (
        isinstance(value, dict)
        and list(value) == ["count", "done"]
        and type(value["count"]) is int
        and 0 <= value["count"] <= 999
        and isinstance(value["done"], bool)
    )


def _lark(rule: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": f"start: {rule}"}]})


GRAMMARS: Mapping[str, Grammar] = {
    "regex": Grammar({"regex": _REGEX}, _lark(f"/{_REGEX}/"), lambda text: re.fullmatch(_REGEX, text) is not None),
    "choice": Grammar(
        {"choice": list(_CHOICES)}, _lark(" | ".join(f'"{text}"' for text in _CHOICES)), lambda text: text in _CHOICES
    ),
    "json": Grammar({"json": _SCHEMA}, json.dumps({"grammars": [{"json_schema": _SCHEMA}]}), _is_object),
}
