"""argparse with our one-line errors."""

import argparse
from typing import NoReturn

from common.errors import ConfigError


class ArgumentParser(argparse.ArgumentParser):
    """Raises ConfigError where argparse would print its usage and exit; a flag must be written out."""

    def __init__(self, prog: str, description: str | None, *, add_help: bool = True) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False, add_help=add_help)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")
