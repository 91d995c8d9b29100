"""Command lines of the small commands: argparse, with our one-line errors and a few types of values."""

import argparse
from collections.abc import Callable
from typing import NoReturn

from common.errors import ConfigError


class ArgumentParser(argparse.ArgumentParser):
    """Raises ConfigError where argparse would print its usage and exit."""

    def __init__(self, prog: str, description: str | None) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


def token_ids(text: str) -> list[int]:
    """'1,2,3' → [1, 2, 3]."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of token ids such as 1,2,3") from None


def integer(minimum: int) -> Callable[[str], int]:
    """Parser of an integer that is at least `minimum`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None
        if value < minimum:
            raise argparse.ArgumentTypeError(f"{value} is too small; at least {minimum}")
        return value

    return parse


def url(text: str) -> str:
    """An http(s) URL without a closing slash."""
    if not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"{text!r} is not a URL such as http://127.0.0.1:8000")
    return text.rstrip("/")
