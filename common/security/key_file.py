"""The key file of one process, as `moerelay keys` makes it: what it shows to others, and whom it believes."""

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec
import structlog

from common.errors import ConfigError
from common.security.watched_file import WatchedFile
from common.small_file import read_small_file

#: Of the file; another one is refused.
FORMAT = 1

#: Before the end of a certificate.
WARN_DAYS = 30

#: Which process a file is for. A worker of role both takes the decode workers' file.
KeyRole = Literal["router", "prefill", "decode"]

log = structlog.get_logger()


class KeyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Keys of the current generation, and what the peers of this process show in this one, the last one and the next.

    PEM: `certificate`, `private_key` and each authority in `trusted`. CURVE keys are 32 bytes in hexadecimal.
    """

    format: int
    #: Names the cluster; files of two clusters never fit.
    cluster: str
    role: KeyRole
    generation: int
    #: The day on which the certificate ends, in UTC: YYYY-MM-DD.
    expires: str
    certificate: str
    private_key: str
    trusted: tuple[str, ...]
    #: Prefill: the secret key that it shows to decode workers.
    handoff_secret_key: str | None = None
    #: Decode: public keys of the prefill workers that are admitted.
    handoff_clients: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """Without secrets: this may end up in a log."""
        return f"KeyFile(cluster={self.cluster!r}, role={self.role!r}, generation={self.generation})"

    @property
    def trusted_pem(self) -> bytes:
        """All authorities, as TLS libraries take them."""
        return "".join(self.trusted).encode()

    def days_left(self, now: datetime | None = None) -> int:
        """Whole days until the certificate ends; negative afterwards."""
        return self._left(now).days

    def seconds_left(self, now: datetime | None = None) -> float:
        """Until the day on which the certificate ends begins; negative afterwards."""
        return self._left(now).total_seconds()

    def _left(self, now: datetime | None) -> timedelta:
        return datetime.strptime(self.expires, "%Y-%m-%d").replace(tzinfo=UTC) - (now or datetime.now(UTC))


def watch_key_file(path: Path, role: KeyRole, clock: Callable[[], float] = time.monotonic) -> WatchedFile[KeyFile]:
    """As `read_key_file`, and again whenever it changes. The log says every day that its certificate ends soon.

    A file of another cluster is not taken over: all peers would be lost at once.
    """
    read = partial(read_key_file, role=role, cluster=read_key_file(path, role).cluster)
    file = WatchedFile(path, read, warn_of_end, every_day=warn_of_end, clock=clock)
    warn_of_end(file.value)
    return file


def warn_of_end(keys: KeyFile) -> None:
    """Says so if there is little time left."""
    if keys.days_left() < WARN_DAYS:
        log.warning("cluster_keys_end_soon", expires=keys.expires, hint="run `moerelay keys rotate`")


def read_key_file(path: Path, role: KeyRole | None = None, cluster: str | None = None) -> KeyFile:
    """Of any kind of process without a `role`, of any cluster without a `cluster`.

    Raises:
        ConfigError: it cannot be read, is none of `moerelay keys`, is damaged, or is for another kind of process or
            another cluster.
    """
    flag = f"--cluster-key-file {path}"
    try:
        keys = msgspec.json.decode(read_small_file(path), type=KeyFile)
    except OSError as error:
        raise ConfigError(f"{flag} cannot be read: {error.strerror}; `moerelay keys init` makes such files") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        # Its message says where, and never what is there.
        raise ConfigError(f"{flag} is no file of `moerelay keys`: {error}") from error
    if keys.format != FORMAT:
        raise ConfigError(
            f"{flag} has format {keys.format}, and this version knows {FORMAT}; use `moerelay keys` of it"
        )
    if role is not None and keys.role != role:
        raise ConfigError(f"{flag} is for a {keys.role} process; give this one {role}.json of the same folder")
    if cluster is not None and keys.cluster != cluster:
        raise ConfigError(f"{flag} is of cluster {keys.cluster}, this process of {cluster}; to change, start it anew")
    if (damage := _damage(keys)) is not None:
        raise ConfigError(f"{flag} is damaged{damage}; make it anew with `moerelay keys rotate`")
    return keys


def exposed(path: Path) -> str | None:
    """Why others of this machine may read a key file; None: they may not, or there is none."""
    try:
        mode = path.stat().st_mode & 0o777
    except OSError:
        return None
    return f"{path} has mode {mode:04o}; others can read it, which chmod 600 ends" if mode & 0o077 else None


def _damage(keys: KeyFile) -> str | None:
    """How the contents are not whole, or do not fit together, as far as this file can tell; None: they do."""
    wanted = {"router": (False, False), "prefill": (True, False), "decode": (False, True)}[keys.role]
    if not keys.trusted or (keys.handoff_secret_key is not None, bool(keys.handoff_clients)) != wanted:
        return ""
    try:
        datetime.strptime(keys.expires, "%Y-%m-%d")
        curve = [bytes.fromhex(key) for key in (*keys.handoff_clients, keys.handoff_secret_key) if key is not None]
    except ValueError:
        return ""
    return "" if any(len(key) != 32 for key in curve) else _misfit(keys)


def _misfit(keys: KeyFile) -> str | None:
    """None if the private key is that of the certificate, and every authority one of this cluster."""
    # Late: what only names keys need not wait for it.
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_private_key
    from cryptography.x509 import load_pem_x509_certificate

    try:
        shown = load_pem_x509_certificate(keys.certificate.encode())
        trusted = [load_pem_x509_certificate(each.encode()) for each in keys.trusted]
        fits = load_pem_private_key(keys.private_key.encode(), password=None).public_key() == shown.public_key()
    except (ValueError, TypeError, UnsupportedAlgorithm):  # no PEM, encrypted, or of a kind that is never made here
        return ": it holds what is no certificate or key"
    if not fits:
        return ": its private key is not that of its certificate"
    names = [shown.issuer, *(each.subject for each in trusted)]
    if any(not name.rfc4514_string().startswith(f"CN=moerelay {keys.cluster} ") for name in names):
        return ": it holds a certificate of another cluster"
    return None
