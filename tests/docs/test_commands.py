"""Every command line that a page shows, run or not, has flags and values that its command accepts."""

import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module

import pytest

from common.config import DecodeSettings, LogSettings, PrefillSettings, RouterSettings, UpSettings
from common.settings_loader import load_settings
from deploy.cli import COMMANDS
from tests.docs.blocks import blocks

SERVICES: dict[str, type[LogSettings]] = {
    "moerelay up": UpSettings,
    "python -m router": RouterSettings,
    "python -m prefill_worker": PrefillSettings,
    "python -m decode_worker": DecodeSettings,
}

#: Words in capitals, brackets and dots: the form of a command instead of one.
FORM = re.compile(r"[\[(|…]|\b[A-Z]{2,}\b|(?<= )[A-Z]\b")
SHOWN = re.compile(r"(?:\.venv/bin/)?(moerelay [a-z][a-z-]*|python -m (?:router|prefill_worker|decode_worker))\b(.*)")

Parse = Callable[[Sequence[str]], object]


def shown() -> Iterator[tuple[str, str, str]]:
    """(place, program, arguments) of every command of ours."""
    for block in blocks("bash", "sh", "console"):
        # A form may go on in lines of its own, in brackets.
        text = re.sub(r"\n +(?=\[)", " ", "\n".join(block.statements))
        for line in text.splitlines():
            if found := SHOWN.match(line):
                yield block.name, found[1], found[2]


def parser_of(program: str) -> Parse:
    if program in SERVICES:
        return lambda argv: load_settings(SERVICES[program], argv, prog=program, environ={})
    module, _ = COMMANDS[program.removeprefix("moerelay ")]
    command_line = getattr(import_module(module), "command_line", None)
    return command_line().parse_args if command_line else list


def flags_of(program: str) -> set[str]:
    if program in SERVICES:
        names = {name.replace("_", "-") for name in SERVICES[program].model_fields} | {"config"}
        return {f"--{name}" for name in names} | {f"--no-{name}" for name in names}
    module, _ = COMMANDS[program.removeprefix("moerelay ")]
    return set(re.findall(r"--[a-z][a-z-]*", import_module(module).command_line().format_help()))


@pytest.mark.parametrize(("place", "program", "arguments"), list(shown()))
def test_commands_are_understood(place: str, program: str, arguments: str) -> None:
    if FORM.search(arguments):
        named = re.findall(r"--[a-z][a-z-]*", arguments)
        assert set(named) <= flags_of(program)
    else:
        argv = shlex.split(re.sub(r"\s*&$", "", arguments), comments=True)
        parser_of(program)(argv)
