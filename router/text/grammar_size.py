"""How large a grammar becomes when its repetitions are written out.

llguidance bounds most of its own work, but not two things: literal text that repetitions multiply (`(a{1000}){1000}`
is a string of a million bytes, copied at every step), and objects with many optional properties (time grows with the
square of their number). Both are counted here before llguidance sees them.
"""

import json
import re
from collections.abc import Iterator, Mapping

#: Escapes with braces first, so that their braces are no repetition; a character class is one atom.
_REGEX_ATOM = re.compile(
    r"\\[pPxuU]\{[^}]*\}|\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{(?P<low>\d+)(?P<high>,\d*)?\}|(?P<bracket>[()])|.", re.DOTALL
)
_LARK_ATOM = re.compile(
    r'(?P<text>"(?:\\.|[^"\\])*")|/(?P<regex>(?:\\.|[^/\\\n])+)/|//[^\n]*|\{(?P<low>\d+)(?P<high>,\s*\d*)?\}'
    r"|(?P<bracket>[()])|(?P<name>_?[A-Z][A-Z0-9_]*)\b|\w+|.",
    re.DOTALL,
)
_LARK_REGEX = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/(?P<regex>(?:\\.|[^/\\\n])+)/')
_LARK_RULE = re.compile(r"^[ \t]*[?!]?(\w+)(?:\.-?\d+)?(?:\[[^\]\n]*\])?[ \t]*:", re.MULTILINE)


#: Large enough to be refused, small enough to stay a machine's integer.
_CAP = 2**40
#: The size of a terminal whose parts are being counted.
_PENDING = -1


def regex_size(regex: str) -> int:
    """Number of atoms once bounded repetitions are written out; an unbounded one counts its lower bound."""
    return _Sizer().total(_REGEX_ATOM.finditer(regex), {})


def lark_size(source: str) -> int:
    """Size of the largest terminal or regular expression; rules cost nothing, their repetitions are not written out."""
    starts = list(_LARK_RULE.finditer(source))
    ends = [*(rule.start() for rule in starts[1:]), len(source)]
    bodies = {rule[1]: source[rule.end() : end] for rule, end in zip(starts, ends, strict=True)}
    sizes: dict[str, int] = {}
    for name in bodies:
        if name.isupper():
            _size_terminal(name, bodies, sizes)
    inline = [regex_size(found["regex"]) for found in _LARK_REGEX.finditer(source) if found["regex"]]
    return max([0, *sizes.values(), *inline])


def property_cost(schema: object) -> int:
    """Sum over all objects of the square of their number of optional properties."""
    return sum(_optional_properties(node) ** 2 for node in _nodes(schema))


def schema_patterns(schema: object) -> Iterator[str]:
    """The regular expressions in a JSON schema."""
    for node in _nodes(schema):
        match node.get("pattern"):
            case str(pattern):
                yield pattern
        match node.get("patternProperties"):
            case dict(patterns):
                yield from patterns


def embedded_schemas(source: str) -> Iterator[object]:
    """The JSON schemas that a Lark grammar holds as `%json {...}`; what is no JSON is left to llguidance."""
    decoder = json.JSONDecoder()
    for found in re.finditer(r"%json\s*", source):
        try:
            yield decoder.raw_decode(source, found.end())[0]
        except (ValueError, RecursionError):
            continue


class _Sizer:
    """Adds up atoms; a repetition multiplies the atom or group before it."""

    def __init__(self) -> None:
        self._groups = [0]
        self._last = 0

    def total(self, atoms: Iterator[re.Match[str]], names: Mapping[str, int]) -> int:
        for atom in atoms:
            self._add(atom, atom.groupdict(), names)
        return sum(self._groups)

    def _add(self, atom: re.Match[str], parts: Mapping[str, str | None], names: Mapping[str, int]) -> None:
        if parts["bracket"] == "(":
            self._groups.append(0)
        elif parts["bracket"] == ")":
            if len(self._groups) > 1:
                self._put(self._groups.pop())
        elif (low := parts["low"]) is not None:
            high = (parts["high"] or "").strip(", \t\n")
            # Cut, so that digits without end make no number without end.
            times = int((high or low)[:12])
            self._groups[-1] += self._last * (times - 1)
            self._last = min(self._last * times, _CAP)
        else:
            self._put(_atom_size(atom[0], parts, names))

    def _put(self, size: int) -> None:
        self._last = size = min(size, _CAP)
        self._groups[-1] += size


def _atom_size(text: str, parts: Mapping[str, str | None], names: Mapping[str, int]) -> int:
    if (regex := parts.get("regex")) is not None:
        return regex_size(regex)
    if parts.get("text") is not None:
        return len(text) - 2
    return names.get(parts.get("name") or "", 1)


def _size_terminal(name: str, bodies: Mapping[str, str], sizes: dict[str, int]) -> None:
    """Fills `sizes` for `name` and the terminals it uses, without recursion: a grammar may nest them deeply."""
    stack = [name]
    while stack:
        current = stack[-1]
        if current in sizes and sizes[current] != _PENDING:
            stack.pop()
            continue
        uses = {found["name"] for found in _LARK_ATOM.finditer(bodies[current]) if found["name"] in bodies}
        missing = [used for used in uses if used not in sizes]
        if current not in sizes and missing:
            sizes[current] = _PENDING
            stack += missing
            continue
        # A terminal that uses itself is an error that llguidance reports.
        known = {used: max(1, sizes[used]) for used in uses if used in sizes}
        sizes[current] = _Sizer().total(_LARK_ATOM.finditer(bodies[current]), known)
        stack.pop()


def _nodes(schema: object) -> Iterator[dict[str, object]]:
    """Every object of the schema, the schema itself included."""
    stack = [schema]
    while stack:
        match stack.pop():
            case dict(node):
                yield node
                stack += node.values()
            case list(items):
                stack += items


def _optional_properties(node: Mapping[str, object]) -> int:
    match node.get("properties"):
        case dict(properties):
            required = node.get("required")
            return len(properties.keys() - set(map(str, required if isinstance(required, list) else [])))
        case _:
            return 0
