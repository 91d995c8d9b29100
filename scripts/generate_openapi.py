"""Writes docs/openapi.json from the router's schemas, or with --check fails if the committed file differs."""

import argparse
import sys
from pathlib import Path

from router.openapi import document_json

PATH = Path(__file__).resolve().parent.parent / "docs" / "openapi.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only")
    check: bool = parser.parse_args().check
    if not check:
        PATH.parent.mkdir(exist_ok=True)
        PATH.write_text(document_json())
    elif not PATH.exists() or PATH.read_text() != document_json():
        sys.exit("docs/openapi.json differs from the router's schemas; run `make proto`")


if __name__ == "__main__":
    main()
