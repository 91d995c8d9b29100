"""Types of values on the command lines of the small commands."""

import argparse
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from common.arguments import ArgumentParser
from common.setting_types import parse_bytes
from router.auth import listed_keys


def token_ids(text: str) -> list[int]:
    """'1,2,3' → [1, 2, 3]."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of token ids such as 1,2,3") from None


def integer(minimum: int, maximum: int | None = None) -> Callable[[str], int]:
    """Parser of an integer that is at least `minimum`, and at most `maximum` if given."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None
        if value < minimum:
            raise argparse.ArgumentTypeError(f"{value} is too small; at least {minimum}")
        if maximum is not None and value > maximum:
            raise argparse.ArgumentTypeError(f"{value} is too large; at most {maximum}")
        return value

    return parse


#: Parser of a TCP port; 0 stands for a free one.
port = integer(0, 65_535)


def size(text: str) -> int:
    """'1GiB' → 1073741824."""
    try:
        value = parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    assert isinstance(value, int), "what is no number is an error"
    return value


def url(text: str) -> str:
    """An http(s) URL without a closing slash."""
    try:
        parts = urlsplit(text)
        is_url = parts.scheme in ("http", "https") and parts.hostname is not None and parts.port != 0
    except ValueError:  # a port that is none, brackets that do not close
        is_url = False
    if not is_url or not text.isprintable() or " " in text:
        raise argparse.ArgumentTypeError(f"{text!r} is not a URL such as http://127.0.0.1:8000")
    return text.rstrip("/")


def add_api_key_file(parser: ArgumentParser) -> None:
    """Adds --api-key-file."""
    parser.add_argument(
        "--api-key-file", type=Path, help="file with the router's API keys, one per line; the first one is sent"
    )


def first_key(path: Path | None) -> str | None:
    """The key that --api-key-file stands for. Raises ConfigError if the file holds none."""
    return None if path is None else listed_keys(path, "--api-key-file")[0]
