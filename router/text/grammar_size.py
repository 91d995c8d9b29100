"""How large a grammar becomes when its repetitions are written out.

llguidance bounds most of its own work, but not these: literal text that repetitions multiply (`(a{1000}){1000}` is a
string of a million bytes, copied at every step), and expressions with many optional parts or objects with many optional
properties (time grows with the square of their number). They are counted here before llguidance sees them; Lark
grammars in `router.text.lark_size`.

Counting must be linear and must not be fooled: every pattern here is possessive, and what it takes for a group, a class
or an escape is what the `regex-syntax` crate takes for one. What that refuses anyway may have any size.
"""

import re
from collections.abc import Iterator, Mapping

#: Escapes with braces first, so that their braces are no repetition. `]` right behind the beginning of a class is a
#: character. White space around the numbers of a repetition is allowed.
_REGEX_ATOM = re.compile(
    r"\\[pPxuU]\{[^}]*+\}?|\\.|(?P<opens>\[\^?\]?)|(?P<closes>\])|\((?P<flags>\?[A-Za-z-]*+)?+|(?P<end>\))"
    r"|\{\s*+(?P<low>\d++)\s*+(?:,\s*+(?P<high>\d*+)\s*+)?\}|(?P<optional>[*?]|\|(?=[|)])|(?<=[(|:])\|)|.",
    re.DOTALL,
)
#: Large enough to be refused, small enough to stay a machine's integer.
_CAP = 2**40
#: What a part that may be left out counts: a thousand of them, each `.*`, are compiled in about a tenth of a second.
OPTIONAL_SIZE = 64


class GrammarSizeError(ValueError):
    """The size cannot be told, or reading the grammar would take too deep a recursion."""


class SizeSum:
    """Adds up the sizes of atoms in groups; a repetition multiplies the atom or group before it."""

    def __init__(self) -> None:
        self._groups = [0]
        self._last = 0

    def put(self, size: int) -> None:
        """An atom."""
        self._last = size = min(size, _CAP)
        self._groups[-1] += size

    def open(self) -> None:
        """A group begins."""
        self._groups.append(0)

    def close(self) -> None:
        """The innermost group ends. One that never began is an error that llguidance reports."""
        if len(self._groups) > 1:
            self.put(self._groups.pop())

    def make_optional(self) -> None:
        """The last atom or group, or the alternative here, may be left out."""
        self._groups[-1] += OPTIONAL_SIZE
        self._last = min(self._last + OPTIONAL_SIZE, _CAP)

    def repeat(self, low: str, high: str | None) -> None:
        """The last atom or group comes `high` times, or `low` times and more."""
        # Cut, so that digits without end make no number without end.
        times = int((high or low).lstrip("0")[:12] or "0")
        self._groups[-1] += self._last * (times - 1)
        self._last = min(self._last * times, _CAP)
        if not low.strip("0"):
            self.make_optional()

    @property
    def total(self) -> int:
        return sum(self._groups)


def regex_size(regex: str) -> int:
    """Number of atoms once bounded repetitions are written out; an unbounded one counts its lower bound.

    An atom or alternative that may be left out counts `OPTIONAL_SIZE` more.

    Raises:
        GrammarSizeError: it uses the flag x.
    """
    sizes = SizeSum()
    #: Classes may hold classes.
    depth = 0
    for atom in _REGEX_ATOM.finditer(regex):
        if atom["opens"]:
            depth += 1
        elif depth:
            depth -= atom["closes"] is not None
            if not depth:
                sizes.put(1)
        else:
            _add(sizes, atom)
    return sizes.total


def verbose_regex() -> GrammarSizeError:
    """An error: comments in such an expression may hold brackets."""
    return GrammarSizeError("regular expressions with the flag x (verbose) are not supported; leave out comments")


def _add(sizes: SizeSum, atom: re.Match[str]) -> None:
    if (low := atom["low"]) is not None:
        sizes.repeat(low, atom["high"])
    elif atom["optional"]:
        sizes.make_optional()
    elif atom["end"]:
        sizes.close()
    elif atom[0].startswith("("):
        if "x" in (atom["flags"] or ""):
            raise verbose_regex()
        sizes.open()
    else:
        sizes.put(1)


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
