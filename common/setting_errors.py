"""What pydantic finds wrong with settings, as one sentence each: the flag, what it takes, and an example."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from common.config import ENV_PREFIX
from common.suggestion import close_match

_Schema = Mapping[str, Any]

#: A value that is repeated in a message is cut here.
_MAX_SHOWN_CHARS = 60
#: Larger bounds are those of the machine, not of the setting.
_TOO_LARGE_TO_TELL = 2**53
#: Bounds of integers as JSON schemas write them (pydantic keeps its own words beside validators); what to add to them.
_LOWEST = {"minimum": 0, "ge": 0, "exclusiveMinimum": 1, "gt": 1}
_HIGHEST = {"maximum": 0, "le": 0, "exclusiveMaximum": -1, "lt": -1}


def sentence(error: ErrorDetails, cls: type[BaseModel]) -> str:
    """One pydantic error about a setting of `cls`, or about several of them."""
    if not error["loc"]:
        return error["msg"].removeprefix("Value error, ")
    name = str(error["loc"][0])
    flag = f"--{name.replace('_', '-')}"
    if error["type"] == "extra_forbidden":
        match = close_match(name, cls.model_fields)
        return f"{flag[2:]}: unknown setting" + ("" if match is None else f"; did you mean {match.replace('_', '-')}?")
    schema = cls.model_json_schema()["properties"].get(name, {})
    example = _example(schema)
    such_as = "" if example is None else f", e.g. {flag} {example}"
    if _alternative(schema).get("type") == "boolean":  # a flag has no value, so that this one is not from a flag
        such_as = f", e.g. {ENV_PREFIX}{name.upper()}={example}"
    if error["type"] in ("missing", "string_too_short"):
        what = str(schema.get("description", "a value")).rstrip(".")
        return f"{flag} is missing: {what[:1].lower()}{what[1:]}{such_as}"
    accepted = _accepted(_alternative(schema))
    if accepted is None or error["type"] == "value_error":  # the words of our own validators are complete
        return f"{flag}: {error['msg'].removeprefix('Value error, ')}"
    return f"{flag} {str(error['input'])[:_MAX_SHOWN_CHARS]}: must be {accepted}{such_as}"


def _alternative(schema: _Schema) -> _Schema:
    """Of a setting that may be left out, what it is if it is not."""
    found: _Schema = next((each for each in schema.get("anyOf", ()) if each.get("type") != "null"), schema)
    return found


def _accepted(schema: _Schema) -> str | None:
    """In words; None: there are none."""
    if "enum" in schema:
        return f"one of {', '.join(map(str, schema['enum']))}"
    if schema.get("type") == "boolean":
        return "true or false"
    if schema.get("type") == "integer":
        lowest, highest = _bound(schema, _LOWEST), _bound(schema, _HIGHEST)
        if highest is not None and highest < _TOO_LARGE_TO_TELL:
            return f"a whole number from {lowest or 0} to {highest}"
        return "a whole number" if lowest is None else f"a whole number of at least {lowest}"
    if schema.get("type") == "number":
        return _number(schema)
    return None


def _number(schema: _Schema) -> str:
    if "maximum" in schema:
        return f"a number from {schema['minimum']} to {schema['maximum']}"
    return "a number that is not negative" if "minimum" in schema else "a number of more than 0"


def _bound(schema: _Schema, words: Mapping[str, int]) -> int | None:
    return next((int(schema[word]) + change for word, change in words.items() if word in schema), None)


def _example(schema: _Schema) -> object:
    """A value that is accepted; None: nothing says one."""
    one = _alternative(schema)
    for found in (*schema.get("examples", ()), *one.get("examples", ()), schema.get("default"), *one.get("enum", ())):
        if found is not None and found != "" and found != []:
            return str(found).lower() if isinstance(found, bool) else found
    return _bound(one, _LOWEST)
