"""From `structured_outputs` (vLLM) and `response_format` (OpenAI) to the grammar that workers enforce.

The result is llguidance's JSON form. It is checked here, without the vocabulary: llguidance's byte tokenizer stands in,
so that a grammar that is wrong, too large or unable to produce anything never reaches a worker.
"""

import json
import re
from collections.abc import Callable, Mapping
from functools import cache

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

from common.errors import InvalidRequestError
from router.text.grammar_size import OPTIONAL_SIZE, GrammarSizeError, property_cost, regex_size, schema_patterns
from router.text.lark_size import embedded_schemas, lark_size
from router.text.tokenizer import check_unicode

_STRUCTURED, _FORMAT = "structured_outputs", "response_format"
_KINDS = ("json", "regex", "choice", "grammar", "json_object")
_FLAGS = ("json_object", "disable_any_whitespace", "disable_additional_properties")
#: 800 optional properties in one object are compiled in about a tenth of a second.
_MAX_PROPERTY_COST = 800**2
#: Number of rules times length: the conversion looks at every rule again for each one that it finds to be a terminal.
_MAX_GBNF_COST = 2**22
#: What may stand between two tokens of JSON; far more than anyone means.
_MAX_WHITESPACE_PATTERN = 1000
#: What tells Lark from GBNF. llguidance's own test for it is the same, but takes very long for many empty lines.
_LARK_SIGN = re.compile(r"^[^\S\n]*+(?:%llguidance\b|start\s*+:)", re.MULTILINE)
#: Enough for a person to see the place; llguidance may quote the whole grammar.
_MAX_REASON = 400


def grammar_of_structured_outputs(fields: Mapping[str, object], *, max_bytes: int) -> str | None:
    """The grammar that vLLM's `structured_outputs` asks for; None if it asks for none.

    Fields: one of `json` (a schema, or its text), `regex`, `choice` (strings), `grammar` (llguidance's Lark dialect, or
    GBNF with a rule `root`), `json_object` (true); for JSON `disable_any_whitespace` and `whitespace_pattern` too.
    Nulls are absent.

    Raises:
        InvalidRequestError: `param` is "structured_outputs"; the message names the field and what is wrong.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    given = {name: value for name, value in given.items() if value is not False or name not in _FLAGS}
    if "structural_tag" in given:
        raise _refused(_STRUCTURED, "structural_tag is not supported")
    if "disable_additional_properties" in given:
        raise _refused(
            _STRUCTURED, 'disable_additional_properties is not supported; write "additionalProperties": false'
        )
    kinds = [name for name in _KINDS if name in given]
    if len(kinds) > 1:
        raise _refused(_STRUCTURED, f"{' and '.join(kinds)} exclude one another; give one")
    if not kinds:
        return None
    source = _Source(_STRUCTURED, kinds[0], max_bytes)
    value = given[kinds[0]]
    match kinds[0]:
        case "json":
            return source.schema(value, _json_options(given))
        case "json_object":
            return source.schema(source.flag_schema(value), _json_options(given))
        case "regex":
            return source.regex(value)
        case "choice":
            return source.choice(value)
        case _:
            return source.grammar(value)


def grammar_of_response_format(fields: Mapping[str, object], *, max_bytes: int) -> str | None:
    """The grammar that OpenAI's `response_format` asks for; None for {"type": "text"}.

    `strict` changes nothing: a schema is always enforced.

    Raises:
        InvalidRequestError: `param` is "response_format"; the message names the field and what is wrong.
    """
    match fields:
        case {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return _Source(_FORMAT, "json_object", max_bytes).schema({"type": "object"}, {})
        case {"type": "json_schema", "json_schema": {"schema": schema}} if schema is not None:
            return _Source(_FORMAT, "json_schema.schema", max_bytes).schema(schema, {})
        case {"type": "json_schema"}:
            raise _refused(_FORMAT, 'json_schema must be an object like {"name": "answer", "schema": {...}}')
        case _:
            raise _refused(_FORMAT, f"type must be text, json_object or json_schema, got {fields.get('type')!r:.100}")


def _json_options(given: Mapping[str, object]) -> dict[str, object]:
    """How white space is treated in JSON, as llguidance's options."""
    options: dict[str, object] = {}
    if "disable_any_whitespace" in given:
        options["whitespace_flexible"] = False
    match given.get("whitespace_pattern"):
        case None:
            pass
        case str(pattern) if len(pattern) <= _MAX_WHITESPACE_PATTERN:
            _Source(_STRUCTURED, "whitespace_pattern", _MAX_WHITESPACE_PATTERN).regex(pattern)
            options["whitespace_pattern"] = pattern
        case other:
            raise _refused(
                _STRUCTURED,
                f"whitespace_pattern must be a regular expression of at most {_MAX_WHITESPACE_PATTERN} characters, got "
                f"{other!r:.100}",
            )
    return options


class _Source:
    """One field of a request that describes a grammar: `param.field`, at most `max_bytes` long."""

    def __init__(self, param: str, field: str, max_bytes: int) -> None:
        self._param = param
        self._field = field
        self._max_bytes = max_bytes

    def flag_schema(self, value: object) -> object:
        if value is not True:
            raise self._wrong(f"must be true, got {value!r:.100}")
        return {"type": "object"}

    def schema(self, value: object, options: Mapping[str, object]) -> str:
        """A JSON schema, or its text."""
        schema = self._parsed(value) if isinstance(value, str) else value
        if not isinstance(schema, dict | bool):
            raise self._wrong(f"must be a JSON schema, that is an object, got {schema!r:.100}")
        self._bounded(self._dumped(schema))
        self._sensible(schema)
        return self._checked(_json_form(schema, options))

    def regex(self, value: object) -> str:
        text = self._text(value)
        self._not_blown_up(regex_size, text, "it")
        return self._checked(LLMatcher.grammar_from_regex(text))

    def choice(self, value: object) -> str:
        """A list of strings, one of which is the output."""
        if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
            raise self._wrong(f"must be a list of at least one string, got {value!r:.100}")
        text = self._text("start: " + " | ".join(json.dumps(item, ensure_ascii=False) for item in value))
        return self._checked(_lark_form(text))

    def grammar(self, value: object) -> str:
        """llguidance's Lark dialect (a rule `start: …`), or GBNF (a rule `root ::= …`)."""
        text = self._text(value)
        lark = text if _LARK_SIGN.search(text) else self._lark_of_gbnf(text)
        self._not_blown_up(lark_size, lark, "it")
        for schema in embedded_schemas(lark):
            self._sensible(schema)
        return self._checked(_lark_form(lark))

    def _lark_of_gbnf(self, text: str) -> str:
        num_rules = text.count("::=")
        if num_rules * len(text) > _MAX_GBNF_COST:
            raise self._wrong(f"has too many rules ({num_rules}) for its length; write it in Lark's form")
        try:
            return gbnf_to_lark(text)
        except Exception as error:  # the converter raises no other class, but for its own slips
            raise self._wrong(f"is no grammar: {error!s:.{_MAX_REASON}}") from error

    def _text(self, value: object) -> str:
        if not isinstance(value, str):
            raise self._wrong(f"must be a string, got {value!r:.100}")
        check_unicode(value, param=self._param)
        self._bounded(value)
        return value

    def _parsed(self, text: str) -> object:
        self._bounded(text)
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise self._wrong(f"is not JSON: {error}") from error

    def _dumped(self, schema: object) -> str:
        try:
            return json.dumps(schema, allow_nan=False)
        except (ValueError, RecursionError) as error:
            raise self._wrong(f"cannot be written as JSON: {error}") from error

    def _bounded(self, text: str) -> None:
        size = len(text.encode(errors="surrogatepass"))
        if size > self._max_bytes:
            raise self._wrong(f"has {size} bytes, more than the {self._max_bytes} allowed")

    def _sensible(self, schema: object) -> None:
        if property_cost(schema) > _MAX_PROPERTY_COST:
            raise self._wrong("lists too many optional properties; make them required, or at most 800 in all objects")
        for pattern in schema_patterns(schema):
            self._not_blown_up(regex_size, pattern, "a pattern")

    def _not_blown_up(self, size_of: Callable[[str], int], text: str, what: str) -> None:
        try:
            size = size_of(text)
        except GrammarSizeError as error:
            raise self._wrong(f"is refused: {error}") from error
        if size > self._max_bytes:
            raise self._wrong(
                f"is too large: with repetitions written out, {what} has more than {self._max_bytes} parts, where one "
                f"that may be left out counts {OPTIONAL_SIZE}"
            )

    def _checked(self, grammar: str) -> str:
        """`grammar`, if llguidance accepts it and it can produce a first byte or end."""
        matcher = LLMatcher(_byte_tokenizer(), grammar, log_level=0, limits=LLParserLimits(verbose_errors=False))
        if not matcher.is_error():
            matcher.compute_bitmask()
            if matcher.is_error():
                raise self._wrong("allows no output at all")
            return grammar
        raise self._wrong(f"is refused: {' '.join(matcher.get_error().split())[:_MAX_REASON]}")

    def _wrong(self, reason: str) -> InvalidRequestError:
        return _refused(self._param, f"{self._field} {reason}")


def _refused(param: str, reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"{param}: {reason}", param=param)


def _lark_form(lark: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": lark}]})


def _json_form(schema: dict[str, object] | bool, options: Mapping[str, object]) -> str:
    if options and schema is not False:
        # llguidance reads its options from this keyword; a schema that is just true cannot hold it.
        schema = {**(schema if isinstance(schema, dict) else {}), "x-guidance": dict(options)}
    return json.dumps({"grammars": [{"json_schema": schema}]})


@cache
def _byte_tokenizer() -> LLTokenizer:
    return LLTokenizer("byte")
