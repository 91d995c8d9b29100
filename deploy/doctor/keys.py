"""What files with keys are worth."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509

from common.errors import ConfigError
from common.security.key_file import WARN_DAYS, exposed, read_key_file
from common.security.tls import check_pair
from deploy.doctor.check import Check
from router.auth import listed_keys

_ROTATE = "run `moerelay keys rotate` where the file was made"


@dataclass(frozen=True, slots=True)
class Keys:
    """A file for --cluster-key-file."""

    path: str
    cluster: str
    role: str
    generation: int
    #: The last day, and how far it is.
    expires: str
    days_left: int
    #: Who else can read it, in words; None: nobody.
    exposed: str | None


def inspect(path: Path, now: datetime | None = None) -> tuple[Keys | None, list[Check]]:
    """What the file is, None if it is none, and what is to be said about it."""
    try:
        keys = read_key_file(path)
    except ConfigError as error:
        return None, [Check.of_error("keys", error)]
    days_left = keys.days_left(now)
    found = f"{path}: {keys.role}, cluster {keys.cluster}, generation {keys.generation}"
    checks = [
        Check("keys", "ok", found),
        Check("key pair", "ok", "the private key is that of the certificate"),
        _validity(path, keys.expires, days_left, _ROTATE),
        *_permissions(path),
    ]
    return Keys(str(path), keys.cluster, keys.role, keys.generation, keys.expires, days_left, exposed(path)), checks


def inspect_list(path: Path, flag: str) -> Iterator[Check]:
    """Of a file with a key per line, which the flag names."""
    try:
        keys = listed_keys(path, flag)
    except ConfigError as error:
        yield Check.of_error("keys", error)
        return
    yield Check("keys", "ok", f"{path}: {len(keys)} for {flag}")
    yield from _permissions(path)


def inspect_tls(certfile: Path, keyfile: Path | None, now: datetime | None = None) -> Iterator[Check]:
    """Of what a router shows to clients."""
    try:
        check_pair(certfile, keyfile)
    except ConfigError as error:
        yield Check.of_error("tls", error)
        return
    certificate = x509.load_pem_x509_certificates(certfile.read_bytes())[0]
    end = certificate.not_valid_after_utc
    yield Check("tls", "ok", f"{certfile}: {certificate.subject.rfc4514_string() or 'no subject'}, with its key")
    days_left = (end - (now or datetime.now(UTC))).days
    yield _validity(certfile, f"{end:%Y-%m-%d}", days_left, "have a new one made; it is read at once")
    yield from _permissions(keyfile or certfile)


def _validity(path: Path, expires: str, days_left: int, fix: str) -> Check:
    if days_left < 0:
        return Check("validity", "bad", f"{path}: the certificate ended on {expires}", fix)
    if days_left < WARN_DAYS:
        return Check("validity", "warn", f"{path}: the certificate ends on {expires}, in {days_left} days", fix)
    return Check("validity", "ok", f"{path}: until {expires}")


def _permissions(path: Path) -> Iterator[Check]:
    try:
        mode = path.stat().st_mode & 0o777
    except OSError:  # it has gone since it was read
        return
    if mode & 0o077:
        yield Check("mode", "warn", f"{path} has mode {mode:04o}, and others can read it", f"chmod 600 {path}")
    else:
        yield Check("mode", "ok", f"{path}: {mode:04o}")
