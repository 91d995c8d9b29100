"""The folder in which the keys of a cluster lie: authority.json, one file per kind of process, and keys for clients."""

import os
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import get_args

import msgspec

from common.errors import ConfigError
from common.security.key_file import KeyFile, KeyRole, read_key_file
from deploy.keys.authority import Authority

AUTHORITY = "authority.json"
API_KEYS = "api-keys.txt"
ADMIN_KEYS = "admin-keys.txt"
ROLES: tuple[KeyRole, ...] = get_args(KeyRole)

_HEADING = (
    "# One key per line; each opens. `moerelay keys rotate` adds one and drops the last but one; other lines stay."
)


class KeyFolder:
    """`path`: made with mode 0700 by `write_new`; every file in it has mode 0600."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def exists(self) -> bool:
        """Whether there are keys."""
        return (self.path / AUTHORITY).exists()

    def authority(self) -> Authority:
        """Raises ConfigError if there is none."""
        path = self.path / AUTHORITY
        try:
            return Authority.decode(path.read_bytes(), str(path))
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}; `moerelay keys init` makes one") from error

    def key_file(self, role: KeyRole) -> KeyFile:
        """As it is there. Raises ConfigError if it cannot be read."""
        return read_key_file(self.path / f"{role}.json", role)

    def behind(self, authority: Authority) -> list[str]:
        """Names of the files that lack the current generation, because a `write` was interrupted."""
        current = authority.current
        clients = {API_KEYS: current.api_key, ADMIN_KEYS: current.admin_key}
        return [
            *(f"{role}.json" for role in ROLES if self._generation(role) < current.number),
            *(name for name, key in clients.items() if key not in self._lines(name)),
        ]

    def write_new(self, authority: Authority, *, now: datetime, days: int) -> None:
        """Raises ConfigError if there are keys already, or the folder cannot be written to."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be made: {error.strerror}") from error
        if self.exists():
            raise ConfigError(f"{self.path} holds keys already; use `moerelay keys rotate`, or another folder")
        self.write(authority, now=now, days=days)

    def write(self, authority: Authority, *, now: datetime, days: int) -> None:
        """Everything that `authority` stands for. What clients were given besides is kept.

        The authority comes first: what an interruption leaves out is `behind` it.
        """
        self._replace(AUTHORITY, msgspec.json.encode(authority))
        for role in ROLES:
            self._overwrite(f"{role}.json", msgspec.json.encode(authority.key_file(role, now=now, days=days)))
        in_use = [each for each in authority.believed if each is not authority.next]
        self._write_clients(API_KEYS, [each.api_key for each in reversed(in_use)], f"mr-{authority.cluster}-")
        self._write_clients(ADMIN_KEYS, [each.admin_key for each in reversed(in_use)], f"mr-admin-{authority.cluster}-")

    def _write_clients(self, name: str, keys: Sequence[str], prefix: str) -> None:
        # A line that was cut off within the prefix would be a key that can be guessed.
        ours = [line for line in self._lines(name) if line.startswith(prefix) or (line and prefix.startswith(line))]
        others = [line for line in self._lines(name) or [_HEADING] if line not in ours]
        self._overwrite(name, "\n".join([*others, *keys, ""]).encode())

    def _generation(self, role: KeyRole) -> int:
        """Of a role's file; 0 if there is none, or it is damaged."""
        try:
            return self.key_file(role).generation
        except ConfigError:
            return 0

    def _lines(self, name: str) -> list[str]:
        """Of a file for clients; none if there is no such file."""
        path = self.path / name
        try:
            return path.read_text("utf-8").splitlines()
        except FileNotFoundError:
            return []
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from error

    def _replace(self, name: str, content: bytes) -> None:
        """In one step."""
        partial = f"{name}.partial"
        self._overwrite(partial, content)
        try:
            (self.path / partial).replace(self.path / name)
        except OSError as error:
            raise ConfigError(f"{self.path / name} cannot be written: {error.strerror}") from error

    def _overwrite(self, name: str, content: bytes) -> None:
        """In place: a container to which this one file is mounted would never see another one of the same name."""
        path = self.path / name
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
            with open(descriptor, "wb") as file:
                os.fchmod(descriptor, 0o600)
                file.write(content)
                file.truncate()
                file.flush()
                os.fsync(descriptor)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
