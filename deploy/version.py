"""`moerelay version`: one line with the version of moerelay."""

from collections.abc import Sequence
from importlib.metadata import version

from common.arguments import ArgumentParser


def main(argv: Sequence[str]) -> int:
    ArgumentParser("moerelay version", "Print the version.").parse_args(argv)
    print(f"moerelay {version('moerelay')}")
    return 0
