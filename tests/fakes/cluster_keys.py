"""Keys of a cluster, made for a test."""

from datetime import UTC, datetime
from pathlib import Path

import msgspec

from common.security.key_file import KeyFile, KeyRole
from deploy.keys.authority import Authority

#: Certificates count from the machine's clock on.
NOW = datetime.now(UTC)


def new_authority() -> Authority:
    return Authority.new(now=NOW, days=90)


def key_file(authority: Authority, role: KeyRole) -> KeyFile:
    return authority.key_file(role, now=NOW, days=90)


def rotated(authority: Authority, times: int = 1) -> Authority:
    for _ in range(times):
        authority = authority.rotated(now=NOW, days=90)
    return authority


def write(path: Path, keys: KeyFile) -> Path:
    """In one step."""
    partial = path.with_suffix(".partial")
    partial.write_bytes(msgspec.json.encode(keys))
    partial.replace(path)
    return path
