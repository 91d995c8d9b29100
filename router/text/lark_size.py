"""How large the terminals of a Lark grammar become when their repetitions are written out, and how deep its rules go.

Texts, regular expressions and comments end where llguidance's lexer ends them; a text or expression that never ends is
an error there, and takes the rest of its line or of the grammar here, so that nothing is read twice.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from router.text.grammar_size import GrammarSizeError, SizeSum, regex_size, verbose_regex

_TOKEN = re.compile(
    r"(?P<skip>(?:\#|//)[^\n]*+|\s++)"
    r'|(?P<text>"(?:\\.|[^"\\\n])*+"?)'
    r"|(?P<regex>/(?:\\.|[^/\\])++(?:/[imslux]*+)?)"
    r"|(?P<special><[^<>\s]++>|[%@][\w-]++)"
    r"|(?P<name>_?[A-Z][_A-Z0-9-]*+|!?[_?]?[a-z][_a-z0-9-]*+)"
    r"|(?P<repeat>\{[ \t]*+\+?(?P<low>\d*+)[ \t]*+(?:,[ \t]*+\+?(?P<high>\d*+)[ \t]*+)?\}"
    r"|~[ \t]*+\+?(?P<from>\d++)(?:[ \t]*+\.\.[ \t]*+\+?(?P<to>\d++))?)"
    r"|(?P<priority>\.[ \t]*+[+-]?\d++|::[ \t]*+_?)"
    r"|(?P<sign>.)"
)
#: The size of a terminal whose parts are being counted.
_PENDING = -1
#: llguidance follows names and brackets by recursion, without a limit for how many definitions lead to one another, nor
#: for braces, and ends the process when the stack is full: 8 MiB of it hold more than twice as much.
_MAX_DEPTH = 1000
_MAX_BRACES = 100

_Tokens = Sequence[re.Match[str]]


def lark_size(source: str) -> int:
    """Size of the largest terminal or regular expression; rules cost nothing, their repetitions are not written out.

    Raises:
        GrammarSizeError: a regular expression uses the flag x, or braces are nested too deeply.
    """
    tokens = list(_TOKEN.finditer(source))
    _check_depth(tokens)
    bodies = _terminals(tokens)
    sizes: dict[str, int] = {}
    for name in bodies:
        _size_terminal(name, bodies, sizes)
    inline = [_regex_token_size(token[0]) for token in tokens if token.lastgroup == "regex"]
    return max([0, *sizes.values(), *inline])


def embedded_schemas(source: str) -> Iterator[object]:
    """The JSON schemas that a Lark grammar holds as `%json {...}`; what is no JSON is left to llguidance."""
    decoder = json.JSONDecoder()
    for found in re.finditer(r"%json\s*+", source):
        try:
            yield decoder.raw_decode(source, found.end())[0]
        except (ValueError, RecursionError):
            continue


def _check_depth(tokens: _Tokens) -> None:
    """As if every definition led to the next, from within its innermost brackets."""
    bounds = [0, *(at for at, _ in _definitions(tokens)), len(tokens)]
    if sum(1 + _nesting(tokens[start:end], "([", ")]") for start, end in pairwise(bounds)) > _MAX_DEPTH:
        raise GrammarSizeError(
            f"too many rules, or too deeply nested ones: a rule counts 1 and its brackets, {_MAX_DEPTH} in all"
        )
    if _nesting(tokens, "{", "}") > _MAX_BRACES:
        raise GrammarSizeError(f"more than {_MAX_BRACES} braces are nested")


def _nesting(tokens: _Tokens, opening: str, closing: str) -> int:
    depth = deepest = 0
    for token in tokens:
        if token.lastgroup == "sign":
            depth += (token[0] in opening) - (token[0] in closing)
            deepest = max(deepest, depth)
    return deepest


def _terminals(tokens: _Tokens) -> dict[str, list[re.Match[str]]]:
    """The definition of each terminal. A nested grammar may define a name again: that counts as one long definition."""
    bodies: dict[str, list[re.Match[str]]] = {}
    starts = [*_definitions(tokens), (len(tokens), len(tokens))]
    for (at, colon), (end, _) in pairwise(starts):
        if (name := tokens[at][0]).isupper():
            bodies.setdefault(name, []).extend(tokens[colon + 1 : end])
    return bodies


def _definitions(tokens: _Tokens) -> Iterator[tuple[int, int]]:
    """Where the name and where the colon of each definition are; between them may be parameters and attributes."""
    name: int | None = None
    depth = 0
    for at, token in enumerate(tokens):
        kind, text = token.lastgroup, token[0]
        if kind in ("skip", "priority"):
            continue
        if name is not None and text in ("[", "{"):
            depth += 1
        elif depth:
            depth -= text in ("]", "}")
        elif kind == "name":
            name = at
        else:
            if name is not None and text == ":":
                yield name, at
            name = None


def _size_terminal(name: str, bodies: Mapping[str, _Tokens], sizes: dict[str, int]) -> None:
    """Fills `sizes` for `name` and the terminals it uses, without recursion: a grammar may nest them deeply."""
    stack = [name]
    while stack:
        current = stack[-1]
        if sizes.get(current, _PENDING) != _PENDING:
            stack.pop()
            continue
        uses = {token[0] for token in bodies[current] if token.lastgroup == "name"} & bodies.keys()
        missing = [used for used in uses if used not in sizes]
        if current not in sizes and missing:
            sizes[current] = _PENDING
            stack += missing
            continue
        # A terminal that uses itself is an error that llguidance reports.
        sizes[current] = _body_size(bodies[current], {used: max(1, sizes[used]) for used in uses if used in sizes})
        stack.pop()


def _body_size(tokens: _Tokens, sizes: Mapping[str, int]) -> int:
    total = SizeSum()
    before = ""
    for token in tokens:
        if token.lastgroup == "skip":
            continue
        if token.lastgroup == "sign":
            _add_sign(total, token[0], before)
        else:
            _add_part(total, token, sizes)
        before = token[0]
    return total.total


def _add_sign(total: SizeSum, sign: str, before: str) -> None:
    """`before`: the token before, to see an empty alternative."""
    if sign in "([":
        total.open()
        return
    if sign in "|)]" and before in ("(", "[", "|"):
        total.make_optional()
    if sign in ")]":
        total.close()
    if sign in "?*]":
        total.make_optional()


def _add_part(total: SizeSum, token: re.Match[str], sizes: Mapping[str, int]) -> None:
    text = token[0]
    match token.lastgroup:
        case "text":
            total.put(len(text) - 2)
            if len(text) == 2:
                total.make_optional()
        case "regex":
            total.put(_regex_token_size(text))
        case "repeat":
            total.repeat(token["from"] or token["low"] or "0", token["to"] or token["high"])
        case _:
            total.put(sizes.get(text, 1))


def _regex_token_size(token: str) -> int:
    """`token`: an expression between slashes, with its flags."""
    body, slash, flags = token[1:].rpartition("/")
    if slash and "x" in flags:
        raise verbose_regex()
    return regex_size(body)
