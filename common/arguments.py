"""argparse with our one-line errors."""

import argparse
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from common.errors import ConfigError


class ArgumentParser(argparse.ArgumentParser):
    """Raises ConfigError where argparse would print its usage and exit; a flag must be written out."""

    def __init__(self, prog: str, description: str | None, *, add_help: bool = True) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False, add_help=add_help)

    def parse_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> Any:
        """As argparse's, but what is unknown comes with what was meant, and before what is missing."""
        given = sys.argv[1:] if args is None else list(args)
        try:
            found, unknown = self.parse_known_args(given, namespace)
        except ConfigError:
            self._refuse([word for word in given if self._is_unknown_flag(word)], given)
            raise
        self._refuse(unknown, given)
        return found

    def _is_unknown_flag(self, word: str) -> bool:
        return word.startswith("--") and word.partition("=")[0] not in {*self._option_string_actions, "--"}

    def _refuse(self, unknown: Sequence[str], given: Sequence[str]) -> None:
        if not unknown:
            return
        from common.suggestion import about_arguments  # late: most command lines are right

        flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
        meant = about_arguments(unknown, given, flags)
        self.error(f"unrecognized arguments: {' '.join(unknown)}{'; ' * bool(meant)}{meant}")

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")
