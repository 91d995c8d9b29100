"""Writes docs/configuration.md from the settings and the parsers of the commands; with --check fails if it differs."""

import argparse
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Literal, Union, get_args, get_origin, get_type_hints

from pydantic.fields import FieldInfo

from common.arguments import ArgumentParser
from common.config import DecodeSettings, LogSettings, PrefillSettings, RouterSettings, UpSettings
from common.setting_types import ByteAmount, ByteSize, CpuList, Duration, Port, Seconds, SecondsOrNone, ThreadSplit
from deploy.cli import COMMANDS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"

#: What takes the settings of a class, by the name that the page uses.
PROGRAMS: dict[str, type[LogSettings]] = {
    "moerelay up": UpSettings,
    "python -m prefill_worker": PrefillSettings,
    "python -m decode_worker": DecodeSettings,
    "python -m router": RouterSettings,
}

#: What a value is called, and how a default of it is written.
KINDS: list[tuple[object, str]] = [
    (ByteSize, "size"),
    (ByteAmount, "size"),
    (Duration, "duration"),
    (Seconds, "seconds"),
    (SecondsOrNone, "seconds"),
    (Port, "port"),
    (CpuList, "cpus"),
    (ThreadSplit, "threads"),
    (bool, "switch"),
    (int, "integer"),
    (float, "number"),
    (Path, "file"),
    (str, "text"),
]

INTRO = """\
<!-- Written by scripts/generate_config_reference.py. Change a description where the setting is declared. -->

# Configuration

Every setting of every process, with its default. [operating.md](operating.md) says what to set when, and
[cli.md](cli.md) what the commands promise.

A setting has one name in three spellings; a later one in this list wins:

1. a key of the file that `--config FILE.toml` names: `max_num_seqs = 32`
2. an environment variable: `MOERELAY_MAX_NUM_SEQS=32`
3. a flag: `--max-num-seqs 32`

A key, variable or flag that no setting knows is an error, and so is a value that is out of range; the message names it.
Settings are read once, when a process starts. A file for `moerelay up`:

```toml
model = "/models/m"
prefill = 2
decode = 2
kv_cache_memory = "8GiB"
slo_itl = "50ms"
cors_origin = ["https://chat.example"]
```

| kind of value | written as |
|---|---|
| size | a number of bytes, or with a unit: `512MiB`, `8GiB`, `1.5GB` |
| duration | seconds, or with a unit: `0.05`, `50ms`, `2s` |
| switch | `--admin-on-public-port` and `--no-admin-on-public-port`; `true` and `false` in files and variables |
| list | the flag repeated, or commas; a list in TOML |
| cpus | as Linux writes them: `0-3,8` |
| threads | `4` for every worker, `6:2` for each prefill and each decode worker |
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only")
    check: bool = parser.parse_args().check
    text = "\n".join([INTRO, *_settings(), *_commands()])
    if not check:
        PAGE.write_text(text)
    elif not PAGE.exists() or PAGE.read_text() != text:
        sys.exit(f"docs/{PAGE.name} differs from the settings; run `make proto`")


def _settings() -> Iterator[str]:
    """A section per class that declares settings: those of `moerelay up` first."""
    classes = {cls: None for program in PROGRAMS.values() for cls in program.__mro__ if issubclass(cls, LogSettings)}
    for cls in classes:
        names = [name for name in cls.__annotations__ if name in cls.model_fields]
        if not names:
            continue
        takers = [name for name, program in PROGRAMS.items() if issubclass(program, cls)]
        yield f"## {_title(cls)}\n"
        yield f"{cls.__doc__} Taken by {', '.join(f'`{name}`' for name in takers)}.\n"
        yield "| flag | value | default | meaning |\n|---|---|---|---|"
        hints = get_type_hints(cls, include_extras=True)
        for name in names:
            yield _setting_row(name, cls.model_fields[name], hints[name])
        yield ""


def _title(cls: type[LogSettings]) -> str:
    """'LocalPrefillSettings' → 'Local prefill settings'."""
    return " ".join(re.findall(r"[A-Z][a-z]*", cls.__name__)).capitalize()


def _setting_row(name: str, field: FieldInfo, hint: object) -> str:
    kind, flag = _kind(hint), f"--{name.replace('_', '-')}"
    shown = "required" if field.is_required() else _default(field.default, kind)
    return f"| `{flag}` | {kind} | {shown} | {_cell(field.description or '')} |"


def _kind(hint: object) -> str:
    """'size', 'integer', or the words to choose from."""
    if get_origin(hint) in (Union, UnionType):
        [hint] = [part for part in get_args(hint) if part is not NoneType]
    for known, word in KINDS:
        if hint is known:
            return word
    if get_origin(hint) is Annotated:
        return _kind(get_args(hint)[0])
    if get_origin(hint) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(hint))
    if get_origin(hint) is list:
        return "list"
    raise TypeError(f"KINDS has no word for {hint}")


def _default(value: object, kind: str) -> str:
    if value is None or value == "" or value == []:
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int) and kind == "size":
        return f"`{_size(value)}`"
    if isinstance(value, float) and kind in ("seconds", "duration"):
        return f"`{value:g}`"
    return f"`{value}`"


def _size(num_bytes: int) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if num_bytes and num_bytes % unit == 0:
            return f"{num_bytes // unit}{name}"
    return str(num_bytes)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _commands() -> Iterator[str]:
    """A section per command that is no process of a cluster."""
    for command, (module, summary) in COMMANDS.items():
        parser = getattr(import_module(module), "command_line", None)
        if parser is not None:
            yield f"## moerelay {command}\n"
            yield f"{summary[0].upper()}{summary[1:]}.\n"
            yield from _flags(parser())
            yield ""


def _flags(parser: ArgumentParser) -> Iterator[str]:
    """Flags of a command, or of each of its own commands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, sub_parser in action.choices.items():
                yield f"`{parser.prog} {name}`:\n"
                yield from _flags(sub_parser)
                yield ""
            return
    yield "| flag | value | default | meaning |\n|---|---|---|---|"
    for action in parser._actions:
        if not isinstance(action, argparse._HelpAction):
            yield _flag_row(action)


def _flag_row(action: argparse.Action) -> str:
    names = ", ".join(f"`{name}`" for name in action.option_strings) or f"`{(action.metavar or action.dest)!s}`"
    # The default has a column of its own.
    meaning = re.sub(
        r" ?\(default: (%\(default\)s|[^)]*)\)|^default: %\(default\)s", "", action.help or ""
    ).strip() % vars(action)
    return f"| {names} | {_flag_value(action)} | {_flag_default(action)} | {_cell(meaning)} |"


def _flag_value(action: argparse.Action) -> str:
    if action.nargs == 0:
        return "switch"
    if action.choices:
        return ", ".join(f"`{choice}`" for choice in action.choices)
    return f"`{action.metavar}`" if action.metavar else _word(action.type)


def _word(kind: object) -> str:
    """What a parser of values is called; those of integers are closures."""
    names = {str: "text", None: "text", int: "integer", float: "number", Path: "file"}
    if kind in names:
        return names[kind]
    name = getattr(kind, "__qualname__", "text").partition(".")[0].lstrip("_").replace("_", " ")
    return {"url": "URL"}.get(name, name)


def _flag_default(action: argparse.Action) -> str:
    if action.required:
        return "required"
    if isinstance(action.default, bool):
        return "on" if action.default else "off"
    return "" if action.default in (None, [], argparse.SUPPRESS) else f"`{action.default}`"


if __name__ == "__main__":
    main()
