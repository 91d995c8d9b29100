"""`moerelay completion bash|zsh|fish`: a script that completes commands, flags and their choices.

The script is static: a shell that completes should not start Python each time.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module

from common.arguments import ArgumentParser
from common.config import UpSettings
from common.settings_loader import settings_parser
from deploy.extras import needs_worker_extra


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag of a command; `choices` is empty where anything goes."""

    name: str
    help: str
    choices: tuple[str, ...]
    takes_value: bool


@dataclass(frozen=True, slots=True)
class Command:
    """One command; `words` are what may stand in the place of its first argument."""

    name: str
    summary: str
    flags: tuple[Flag, ...]
    words: tuple[str, ...]


def command_line() -> ArgumentParser:
    """The flags of this command."""
    parser = ArgumentParser("moerelay completion", "Print a script that completes moerelay's commands in a shell.")
    parser.add_argument("shell", choices=_SCRIPTS, help="for which one")
    return parser


def main(argv: Sequence[str]) -> int:
    shell = command_line().parse_args(argv).shell
    print(_SCRIPTS[shell](described()))
    return 0


def described() -> list[Command]:
    """Every command, from its parser."""
    from deploy.cli import COMMANDS  # late: that module imports this one by name

    with needs_worker_extra("completion"):
        return [_described(name, module, summary) for name, (module, summary) in COMMANDS.items()]


def _described(name: str, module: str, summary: str) -> Command:
    if name == "up":
        parser: ArgumentParser = settings_parser(UpSettings, "moerelay up")
    else:
        make = getattr(import_module(module), "command_line", None)
        parser = ArgumentParser(f"moerelay {name}", None) if make is None else make()
    flags: list[Flag] = []
    words: list[str] = []
    for action in parser._actions:
        choices = tuple(str(choice) for choice in action.choices or ())
        if not action.option_strings:
            words += choices
        takes_value = action.nargs != 0 and not isinstance(action, argparse.BooleanOptionalAction)
        text = "" if action.help in (None, argparse.SUPPRESS) else str(action.help).partition("(default")[0].strip()
        flags += [Flag(each, text, choices, takes_value) for each in action.option_strings if each.startswith("--")]
    return Command(name, summary, tuple(flags), tuple(words))


def bash(commands: Sequence[Command]) -> str:
    """To be sourced."""
    return "\n".join(
        [
            "_moerelay() {",
            '  local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" words=""',
            "  if (( COMP_CWORD == 1 )); then",
            f'    words="{" ".join(command.name for command in commands)}"',
            "  else",
            '    case "${COMP_WORDS[1]} $before" in',
            *_bash_choices(commands),
            "      *)",
            '        case "${COMP_WORDS[1]}" in',
            *(f'          {c.name}) words="{" ".join([*c.words, *(f.name for f in c.flags)])}" ;;' for c in commands),
            "        esac ;;",
            "    esac",
            "  fi",
            '  COMPREPLY=($(compgen -W "$words" -- "$word"))',
            "}",
            "complete -o default -F _moerelay moerelay",
        ]
    )


def _bash_choices(commands: Sequence[Command]) -> Iterator[str]:
    """After a flag that takes a value come its choices, or files."""
    for command in commands:
        for flag in command.flags:
            if flag.takes_value:
                yield f'      "{command.name} {flag.name}") words="{" ".join(flag.choices)}" ;;'


def zsh(commands: Sequence[Command]) -> str:
    """A file `_moerelay` in a folder of $fpath, or to be evaluated after compinit."""
    cases = (f"    {c.name}) _arguments {' '.join(_zsh_specs(c))} ;;" for c in commands)
    names = " ".join(_quoted(f"{c.name}:{c.summary}") for c in commands)
    return "\n".join(
        [
            "#compdef moerelay",
            "_moerelay() {",
            f"  local -a commands=({names})",
            "  if (( CURRENT == 2 )); then",
            "    _describe command commands",
            "    return",
            "  fi",
            "  local command=$words[2]",
            "  shift words",
            "  (( CURRENT-- ))",
            "  case $command in",
            *cases,
            "  esac",
            "}",
            'if [[ "$funcstack[1]" == _moerelay ]]; then _moerelay "$@"; else compdef _moerelay moerelay; fi',
        ]
    )


def _zsh_specs(command: Command) -> Iterator[str]:
    for flag in command.flags:
        text = flag.help.replace("[", "(").replace("]", ")").replace(":", "\\:")
        value = ""
        if flag.takes_value:
            value = f":value:({' '.join(flag.choices)})" if flag.choices else ":value:_files"
        yield _quoted(f"{flag.name}[{text}]{value}")
    yield _quoted(f"*:argument:({' '.join(command.words)})" if command.words else "*:argument:_files")


def fish(commands: Sequence[Command]) -> str:
    """A file `moerelay.fish` in ~/.config/fish/completions."""
    return "\n".join(_fish_lines(commands))


def _fish_lines(commands: Sequence[Command]) -> Iterator[str]:
    names = " ".join(command.name for command in commands)
    none_yet = f"not __fish_seen_subcommand_from {names}"
    for command in commands:
        seen = f"__fish_seen_subcommand_from {command.name}"
        yield f"complete -c moerelay -f -n {_quoted(none_yet)} -a {command.name} -d {_quoted(command.summary)}"
        if command.words:
            yield f"complete -c moerelay -f -n {_quoted(seen)} -a {_quoted(' '.join(command.words))}"
        for flag in command.flags:
            line = f"complete -c moerelay -n {_quoted(seen)} -l {flag.name.removeprefix('--')} -d {_quoted(flag.help)}"
            if flag.choices:
                yield f"{line} -x -a {_quoted(' '.join(flag.choices))}"
            else:
                yield f"{line} -r" if flag.takes_value else line


def _quoted(text: str) -> str:
    """For all three shells: nothing in it means anything."""
    return "'" + text.replace("'", "’") + "'"


_SCRIPTS: dict[str, Callable[[Sequence[Command]], str]] = {"bash": bash, "zsh": zsh, "fish": fish}
