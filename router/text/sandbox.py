"""The jinja environment of chat templates: what transformers offers them, in a sandbox with a clock.

A template comes with the checkpoint, so it is trusted with its output, but neither with this process nor with its time:
attribute access, calls, products and steps of a range look at a deadline, and products that grow (`"x" * n`) at a size.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence, Sized
from contextvars import ContextVar
from datetime import datetime
from typing import overload

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range

#: `time.monotonic` at which the rendering in this context must end.
DEADLINE: ContextVar[float] = ContextVar("chat_template_deadline")

#: Largest string or list that a product may make, and the largest exponent.
_MAX_PRODUCT = 2**20
_MAX_EXPONENT = 64


class TemplateTimeoutError(TemplateError):
    """The template ran past its deadline."""


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks what a trainer learns from; here it is just its content."""

    tags = {"generation"}  # noqa: RUF012 - the name and kind are jinja's

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatSandbox(ImmutableSandboxedEnvironment):
    """Environment of one server's templates; threads share it, each rendering has its own `DEADLINE`."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self, now: Callable[[], datetime]) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.globals["range"] = _Range
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda form: now().strftime(form)

    def getattr(self, obj: object, attribute: str) -> object:
        _check_deadline()
        return super().getattr(obj, attribute)

    def getitem(self, obj: object, argument: object) -> object | Undefined:
        _check_deadline()
        return super().getitem(obj, argument)

    def call(self, context: Context, obj: object, /, *args: object, **kwargs: object) -> object:
        _check_deadline()
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        _check_deadline()
        for one, other in ((left, right), (right, left)):
            grows = operator == "*" and isinstance(one, Sized) and isinstance(other, int)
            if grows and len(one) * other > _MAX_PRODUCT:  # type: ignore[arg-type, operator]
                raise TemplateError(f"the chat template makes a sequence of more than {_MAX_PRODUCT} items")
        if operator == "**" and not (isinstance(right, int | float) and abs(right) <= _MAX_EXPONENT):
            raise TemplateError(f"the chat template has an exponent beyond {_MAX_EXPONENT}")
        return super().call_binop(context, operator, left, right)


class _Range(Sequence[int]):
    """The sandbox's range, of bounded length, which looks at the deadline as it is walked."""

    def __init__(self, *bounds: int) -> None:
        self._range = safe_range(*bounds)

    def __len__(self) -> int:
        return len(self._range)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> range: ...
    def __getitem__(self, index: int | slice) -> int | range:
        return self._range[index]

    def __iter__(self) -> Iterator[int]:
        for number in self._range:
            _check_deadline()
            yield number


def _check_deadline() -> None:
    if time.monotonic() > DEADLINE.get(float("inf")):
        raise TemplateTimeoutError("the chat template takes too long")


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without jinja's HTML escapes, which models never saw in training."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
