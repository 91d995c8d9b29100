"""What a grammar lets through, tried byte by byte with llguidance's own matcher."""

import gc
import json
import time
from collections.abc import Iterator

import pytest
from llguidance import LLMatcher, LLTokenizer

from common.errors import InvalidRequestError
from router.text.grammar import grammar_of_response_format, grammar_of_structured_outputs

MAX_BYTES = 64 * 2**10
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def accepts(grammar: str | None, text: str) -> bool:
    """Whether `text` is a whole output of the grammar."""
    assert grammar is not None
    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return all(matcher.consume_token(byte) for byte in text.encode()) and matcher.is_accepting()


def structured(**fields: object) -> str | None:
    return grammar_of_structured_outputs(fields, max_bytes=MAX_BYTES)


def formatted(**fields: object) -> str | None:
    return grammar_of_response_format(fields, max_bytes=MAX_BYTES)


@pytest.fixture(autouse=True)
def _no_collection() -> Iterator[None]:
    """What earlier tests left in this process is not searched for garbage while a test is timed."""
    gc.disable()
    yield
    gc.enable()


def refusal(**fields: object) -> InvalidRequestError:
    """The refusal, and it came fast. What other threads of the tests' process do meanwhile is not counted."""
    start = time.thread_time()
    with pytest.raises(InvalidRequestError) as caught:
        structured(**fields)
    # 0.2 s of computing where nothing else runs; what is not linear takes minutes.
    assert time.thread_time() - start < 1.0
    assert caught.value.param == "structured_outputs"
    assert len(caught.value.message) < 700
    return caught.value


@pytest.mark.parametrize("schema", [PERSON, json.dumps(PERSON)])
def test_json_schema(schema: object) -> None:
    grammar = structured(json=schema, regex=None)
    assert accepts(grammar, '{"name": "Ada", "age": 36}')
    assert accepts(grammar, '{\n  "name": "é",\n  "age": 36}')
    assert not accepts(grammar, '{"name": "Ada"}')
    assert not accepts(grammar, '{"name": "Ada", "age": "36"}')


def test_white_space_can_be_switched_off_or_described() -> None:
    assert not accepts(structured(json=PERSON, disable_any_whitespace=True), '{"name": "Ada", "age":36}')
    assert accepts(structured(json=PERSON, disable_any_whitespace=True), '{"name":"Ada","age":36}')
    one = structured(json=PERSON, whitespace_pattern=" ?")
    assert accepts(one, '{"name": "Ada", "age": 36}')
    assert not accepts(one, '{"name":  "Ada", "age": 36}')
    assert accepts(structured(json=True, disable_any_whitespace=True), "[1,2]")
    assert not accepts(structured(json=True, disable_any_whitespace=True), "[1, 2]")


def test_json_object() -> None:
    assert accepts(structured(json_object=True), '{"a": [1, null]}')
    assert not accepts(structured(json_object=True), "[1]")
    assert structured(json_object=False) is None


def test_regex_matches_as_a_whole() -> None:
    assert accepts(structured(regex=r"\d{3}-[a-f]+"), "123-abc")
    assert not accepts(structured(regex=r"\d{3}-[a-f]+"), "x123-abc")
    assert not accepts(structured(regex=r"\d{3}-[a-f]+"), "123-")


def test_choice() -> None:
    grammar = structured(choice=["yes", 'n"o\\', "é\n", ""])
    for text in ["yes", 'n"o\\', "é\n", ""]:
        assert accepts(grammar, text)
    assert not accepts(grammar, "ye")


@pytest.mark.parametrize(
    "grammar", ['root ::= "a" x\nx ::= [0-9]+', 'start: "a" X\nX: /[0-9]+/', '%llguidance {}\nstart: "a" /[0-9]+/']
)
def test_gbnf_and_lark_grammars(grammar: str) -> None:
    assert accepts(structured(grammar=grammar), "a12")
    assert not accepts(structured(grammar=grammar), "a")


def test_recursion_is_fine() -> None:
    tree = {"$ref": "#/$defs/t", "$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}}}}
    assert accepts(structured(json=tree), "[[], [[]]]")
    assert accepts(structured(grammar='start: "(" start ")" | "x"'), "((x))")


def test_nothing_asked_for_is_no_grammar() -> None:
    assert structured() is None
    assert structured(json=None, choice=None, unknown=3) is None
    assert formatted(type="text") is None


def test_response_formats() -> None:
    assert accepts(formatted(type="json_object"), "{}")
    schema = {"name": "person", "schema": PERSON, "strict": True}
    assert accepts(formatted(type="json_schema", json_schema=schema), '{"name": "Ada", "age": 36}')


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"json": PERSON, "regex": "a"}, "json and regex"),
        ({"json": 5}, "json must be a JSON schema"),
        ({"json": "{"}, "json is not JSON"),
        ({"json": "[1]"}, "json must be a JSON schema"),
        ({"json": "[" * 10_000}, "json is not JSON"),
        ({"json": False}, "schema is false"),
        ({"json": {"type": "foo"}}, "Invalid type"),
        ({"json": {"$ref": "http://example.com/x"}}, "example.com"),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "Unsatisfiable"),
        ({"json": {"$ref": "#/$defs/x", "$defs": {"x": {"$ref": "#/$defs/x"}}}}, "no output"),
        ({"json": {"type": "string", "pattern": "("}}, "unclosed group"),
        ({"json": {"const": "\ud800"}}, "json"),
        ({"regex": "(a"}, "regex"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"regex": 5}, "regex must be a string"),
        ({"regex": "\ud800"}, "surrogate"),
        ({"regex": r"[^\x00-\x{10FFFF}]"}, "no output"),
        ({"choice": []}, "choice"),
        ({"choice": "a"}, "choice"),
        ({"choice": ["a", 1]}, "choice"),
        ({"choice": ["\udfff"]}, "surrogate"),
        ({"grammar": "start: x"}, "unknown name"),
        ({"grammar": 'foo ::= "a"'}, "root"),
        ({"grammar": 'root ::= "a'}, "grammar"),
        ({"grammar": "root ::= " + "(" * 5000}, "grammar"),
        ({"grammar": "start: " + "(" * 5000 + '"a"' + ")" * 5000}, "nested"),
        ({"grammar": ""}, "grammar"),
        ({"json_object": 1}, "json_object must be true"),
        ({"structural_tag": "{}"}, "structural_tag"),
        ({"json": {}, "whitespace_pattern": 3}, "whitespace_pattern"),
        ({"json": {}, "whitespace_pattern": "("}, "whitespace_pattern"),
        ({"json": {}, "disable_additional_properties": True}, "additionalProperties"),
    ],
)
def test_refusals_name_the_fault(fields: dict[str, object], named: str) -> None:
    assert named in refusal(**fields).message


def deep(levels: int) -> dict[str, object]:
    schema: dict[str, object] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


HUGE: dict[str, dict[str, object]] = {
    "long": {"regex": "a" * (MAX_BYTES + 1)},
    "long choice": {"choice": ["a" * 1000] * 100},
    "long schema": {"json": {"enum": [f"value {i}" for i in range(10_000)]}},
    "deep schema": {"json": deep(5000)},
    "deep but legible": {"json": deep(900)},
    "wide schema": {"json": {"type": "object", "properties": {f"{i}": {} for i in range(5000)}}},
    "repetition": {"regex": "(a{1000}){1000}"},
    "number without end": {"regex": "a{" + "9" * 5000 + "}"},
    "repetition in a pattern": {"json": {"type": "string", "pattern": "^(ab{400}){400}$"}},
    "repetition in a key": {"json": {"type": "object", "patternProperties": {"(a{1000}){1000}": {}}}},
    "terminals": {"grammar": 'start: A\nA: B{1000}\nB: C{1000}\nC: "a"{1000}\n'},
    "doubling": {"grammar": "start: T0\n" + "".join(f"T{i}: T{i + 1} T{i + 1}\n" for i in range(40)) + 'T40: "a"\n'},
    "inline regex": {"grammar": "start: x\nx: /(a{1000}){1000}/"},
    "schema in a grammar": {
        "grammar": 'start: %json {"properties": {' + ",".join(f'"{i}":{{}}' for i in range(4000)) + "}}"
    },
    "chained repetition": {"regex": "a" + "{999999999999}" * 4000},
    "gbnf": {"grammar": "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(3000)) + 'r3000 ::= "x"'},
    "allOf": {"json": {"allOf": [{"anyOf": [{"minLength": i}, {"const": i}, {"type": "null"}]} for i in range(20)]}},
}


def filled(unit: str, before: str = "") -> str:
    """`before` and `unit` over and over, as long as may be."""
    return (before + unit * MAX_BYTES)[:MAX_BYTES]


#: Each once made a reader look ahead to the end from every position, or llguidance compile for half a minute.
REPEATED: dict[str, dict[str, object]] = {
    "classes": {"regex": filled("[")},
    "classes that never end": {"regex": "[" * 60_000 + r"\]"},
    "nested classes": {"regex": filled("[[:")},
    "names of classes": {"regex": filled(r"\p{")},
    "repetitions": {"regex": filled("{1,   ")},
    "space in a repetition": {"regex": filled(" ", "a{1,")},
    "optional parts": {"regex": filled("a?")},
    "optional repetitions": {"regex": filled("a{0,2}")},
    "anything, often": {"regex": filled(".*")},
    "empty alternatives": {"regex": filled("(a|)")},
    "optional parts of a pattern": {"json": {"type": "string", "pattern": ".*" * 30_000}},
    "texts": {"grammar": filled('"' + '\\"' * 9, "start: ")},
    "expressions": {"grammar": filled("/\\", "start: ")},
    "empty lines": {"grammar": filled("\n")},
    "names of the first rule": {"grammar": filled("start ")},
    "attributes": {"grammar": filled("A[", "start: ")},
    "marks": {"grammar": filled("!?", "start: ")},
    "schemas": {"grammar": filled("%json [", "start: ")},
    "optional texts": {"grammar": 'start: A\nA: "a"' + ' "a"?' * 10_000},
    "empty alternatives of a terminal": {"grammar": "start: A\nA: " + '("a"|) ' * 9_000},
    "GBNF rules in the wrong order": {
        "grammar": "root ::= r0\n"
        + "".join(f"r{i} ::= r{i + 1}\n" for i in range(900))
        + 'r900 ::= "x"\nbig ::= '
        + '""' * 8000
        + " cycle\ncycle ::= root cycle"
    },
    "white space": {"json": {}, "whitespace_pattern": "[" * 1_000_000},
    "white space, short": {"json": {}, "whitespace_pattern": "(a{1000}){1000}"},
}


@pytest.mark.parametrize("name", REPEATED)
def test_no_construct_takes_long_however_often_it_is_there(name: str) -> None:
    refusal(**REPEATED[name])


#: llguidance reads each of these as more than 64 KiB of literal text.
HIDDEN: dict[str, dict[str, object]] = {
    "spaces in a repetition": {"regex": "(a{ 1000 }){ 1000 }"},
    "leading zeros": {"regex": "(a{00000000000000001000}){1000}"},
    "a bracket in a class in a class": {"regex": "(a{1000}[[a])]){1000}"},
    "a bracket in a comment": {"regex": "(?x)#[\n(a{1000}){1000}"},
    "a bracket in a comment of a group": {"regex": "(?ix:#[\n(a{1000}){1000})"},
    "a bracket in a comment of an expression": {"grammar": "start: /#[\n(a{1000}){1000}/x"},
    "an expression of two lines": {"grammar": "start: /(a{1000}\n){1000}/"},
    "what looks like a definition": {"grammar": "start: A\nA: /(a{1000}\nB: ){1000}/"},
    "tildes": {"grammar": 'start: A\nA: B ~ 1000\nB: "a" ~ 1..1000'},
    "a bound alone": {"grammar": 'start: A\nA: B{,1000}\nB: "a"{,1000}'},
    "signs": {"grammar": 'start: A\nA: B{+1000}\nB: "a"{+1000}'},
    "square brackets": {"grammar": 'start: A\nA: [B]{1000}\nB: ["a"]{1000}'},
    "a dash in a name": {"grammar": 'start: A-A\nA-A: B-B{1000}\nB-B: "a"{1000}'},
    "a quote in a special token": {"grammar": 'start: <|"|> A\nA: B{1000}\nB: "a"{1000}'},
    "a quote in a comment": {"grammar": 'start: A # "\nA: /(a{1000}){1000}/ # "'},
    "two definitions": {"grammar": 'start: A b\nA: "a"{1000}\nb: %lark {\nstart: B\nA: "a"\nB: A{1000}\n}'},
}


@pytest.mark.parametrize("name", HIDDEN)
def test_large_grammars_do_not_hide(name: str) -> None:
    message = refusal(**HIDDEN[name]).message
    assert "too large" in message or "flag x" in message


@pytest.mark.parametrize(
    "regex", [r"\(?x\)?", "[(?x]", r"[^\]a]{2}", "[[a-c]&&[b-d]]{3}", "(?i:a)(?P<x>b)", r"\x{61}{3}", "(?:a|b|)"]
)
def test_brackets_that_are_no_comment_and_no_group_are_fine(regex: str) -> None:
    assert structured(regex=regex) is not None


@pytest.mark.parametrize(
    "grammar",
    [
        "start: " + "A{" * 20_000,  # more than any stack holds
        "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(5000)) + 'r5000: "a"\n',
        "start: T0\n" + "".join(f"T{i}: T{i + 1}\n" for i in range(5000)) + 'T5000: "a"\n',
        "start: r0\n" + "".join(f"r{i}: (((((r{i + 1})))))\n" for i in range(1000)) + 'r1000: "a"\n',
    ],
)
def test_what_llguidance_would_follow_until_the_process_dies_is_refused(grammar: str) -> None:
    assert any(word in refusal(grammar=grammar).message for word in ("braces", "too many rules"))


@pytest.mark.parametrize("grammar", ["%llguidance {}", "%llguidance {}\n// nothing\n", "", "\n", "# x", "// x"])
def test_a_grammar_without_rules_is_refused(grammar: str) -> None:
    assert "grammar" in refusal(grammar=grammar).message


@pytest.mark.parametrize("name", HUGE)
def test_huge_grammars_are_refused_fast(name: str) -> None:
    refusal(**HUGE[name])


@pytest.mark.parametrize(
    "fields",
    [
        {"regex": "[a-z]{1,5000}"},
        {"regex": r"\p{L}{1,2000}[{}a-z]{1,2000}\x{61}"},
        {"json": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(700)}}},
        {"json": {"type": "array", "items": {"type": "string", "maxLength": 10**9}, "maxItems": 10**7}},
        {"grammar": 'start: item{1,100000}\nitem: "a" | "b"'},
    ],
)
def test_large_but_sensible_grammars_are_taken(fields: dict[str, object]) -> None:
    assert structured(**fields) is not None


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"type": "xml"},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"name": "x"}},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": "no"}},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "foo"}}},
    ],
)
def test_wrong_response_formats_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        formatted(**fields)
    assert caught.value.param == "response_format"
