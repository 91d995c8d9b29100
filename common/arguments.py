"""argparse with our one-line errors."""

import argparse
import sys
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NoReturn

from common.errors import ConfigError

#: What follows a flag that takes no value, and is meant as one.
_SWITCHED = ("true", "false", "yes", "no", "on", "off", "1", "0")


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
            self._refuse_values(word.partition("=")[::2] for word in given if "=" in word)
            raise
        self._refuse(unknown, given)
        return found

    def _is_unknown_flag(self, word: str) -> bool:
        return word.startswith("--") and word.partition("=")[0] not in {*self._option_string_actions, "--"}

    def _refuse(self, unknown: Sequence[str], given: Sequence[str]) -> None:
        if not unknown:
            return
        self._refuse_values(pair for pair in pairwise(given) if pair[1] in unknown and pair[1].lower() in _SWITCHED)
        from common.suggestion import about_arguments  # late: most command lines are right

        flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
        meant = about_arguments(unknown, given, flags)
        self.error(f"unrecognized arguments: {' '.join(unknown)}{'; ' * bool(meant)}{meant}")

    def _refuse_values(self, given: Iterable[tuple[str, ...]]) -> None:
        """`given`: what may be flags, each with what may be meant as its value."""
        for flag, value in given:
            action = self._option_string_actions.get(flag)
            if action is not None and action.nargs == 0:
                names = " or ".join(name for name in action.option_strings if name.startswith("--"))
                spelled = names if " or " in names else f"{names} or leave it out"
                self.error(f"{flag} takes no value such as {value!r}; write {spelled}")

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")
