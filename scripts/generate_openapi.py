"""Writes docs/openapi*.json from the router's schemas, or with --check fails if a committed file differs."""

import argparse
import sys
from pathlib import Path

from router.openapi import document, json_text
from router.surface import CONTROL, PUBLIC

DOCS = Path(__file__).resolve().parent.parent / "docs"

FILES = {"openapi.json": PUBLIC, "openapi-control.json": CONTROL}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only")
    check: bool = parser.parse_args().check
    for name, surface in FILES.items():
        path, text = DOCS / name, json_text(document(surface.title, surface.operations))
        if not check:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            sys.exit(f"docs/{name} differs from the router's schemas; run `make proto`")


if __name__ == "__main__":
    main()
