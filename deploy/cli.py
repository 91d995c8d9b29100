"""The console script `moerelay`: finds the command and turns errors into one line and an exit code.

Each command lives in its own module with `main(argv) -> exit code`, imported only when it is asked for.
"""

import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module

from common.errors import STARTUP_EXIT_CODE, ConfigError
from common.program import run_program

#: Command → module and what it does.
COMMANDS: dict[str, tuple[str, str]] = {
    "up": ("deploy.up", "start a cluster on this machine"),
    "generate": ("deploy.generate", "stream one completion and show its routing"),
    "verify": ("deploy.verify.command", "check a running cluster bytewise against solo runs"),
    "replay": ("deploy.replay", "compute a request again that a self-check has kept"),
    "status": ("deploy.status", "show the workers of a running cluster, their load and their rates"),
    "advise": ("deploy.advise.command", "say how many workers of each kind a workload needs"),
    "doctor": ("deploy.doctor.command", "say whether this machine is ready, and what to fix if not"),
    "keys": ("deploy.keys.command", "make, rotate and show the keys of a cluster that spans machines"),
    "make-model": ("deploy.make_model", "write a seeded random checkpoint"),
    "completion": ("deploy.completion", "print a script that completes commands and flags in a shell"),
    "version": ("deploy.version", "print the version"),
}


def usage() -> str:
    lines = [f"  {name:<12}{summary}" for name, (_, summary) in COMMANDS.items()]
    return "\n".join(["usage: moerelay COMMAND [--help] …", "", *lines])


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code. Errors are one line on stderr: code 2 before anything ran, else 1."""
    return run_program("moerelay", partial(_dispatch, list(sys.argv[1:] if argv is None else argv)))


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage(), file=sys.stdout if argv else sys.stderr)
        return 0 if argv else STARTUP_EXIT_CODE
    name = "version" if argv[0] == "--version" else argv[0]
    if name not in COMMANDS:
        from common.suggestion import about_command  # late, as the next

        hint = about_command(name, COMMANDS)
        raise ConfigError(f"there is no command {name!r}; {hint}choose from {', '.join(COMMANDS)}")
    from common.settings_loader import check_environment  # late: the list of commands answers at once

    check_environment()
    module, _ = COMMANDS[name]
    return int(import_module(module).main(argv[1:]))


if __name__ == "__main__":
    sys.exit(main())
