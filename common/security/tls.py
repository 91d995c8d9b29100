"""TLS for clients of the HTTP port: a certificate and its key, from files that may be replaced at any time."""

import math
import ssl
import time
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import structlog

from common.config import ApiSettings
from common.errors import ConfigError
from common.security.watched_file import WatchedFile
from common.small_file import read_small_file

log = structlog.get_logger()

#: Before the end of the certificate: those that renew certificates by themselves have long done so.
WARN_DAYS = 14
DAY_S = 24 * 3600.0

#: Contents of both files; without a key file, the certificate's holds the key, too.
_Pair = tuple[bytes, bytes]


class ServerTls:
    """`context` serves; `files`, to be looked at now and then, keep it up to date for connections to come.

    The log says every day that the certificate ends soon.
    """

    def __init__(self, certfile: Path, keyfile: Path | None) -> None:
        """Raises ConfigError if the files are no pair."""
        self._certfile, self._keyfile = certfile, keyfile
        read = partial(_read_pair, certfile=certfile, keyfile=keyfile)
        file = WatchedFile(certfile, read, self._use, every_day=self._warn_of_end)
        self.files = (file,) if keyfile is None else (file, WatchedFile(keyfile, read, self._use))
        self.context = _new_context()
        self.context.load_cert_chain(certfile, keyfile, password=_no_password)
        self._end_s = _end_s(file.value)
        self._warn_of_end(file.value)

    def seconds_left(self) -> float:
        """Until the certificate that is shown ends; negative afterwards. NaN: of one that only OpenSSL can read."""
        return self._end_s - time.time()

    def _use(self, pair: _Pair) -> None:
        try:
            self.context.load_cert_chain(self._certfile, self._keyfile, password=_no_password)
        except OSError as error:  # the files have changed once more; what they are now is looked at next
            log.error("certificate_unusable", reason=str(error))
            return
        self._end_s = _end_s(pair)
        self._warn_of_end(pair)

    def _warn_of_end(self, _: _Pair) -> None:
        if self.seconds_left() < WARN_DAYS * DAY_S:
            expires = f"{datetime.fromtimestamp(self._end_s, UTC):%Y-%m-%d}"
            log.warning("https_certificate_ends_soon", expires=expires, hint="replace it; it is read at once")


def load_tls(settings: ApiSettings) -> ServerTls | None:
    """None if the port is to speak plain HTTP. Raises ConfigError if the files are no pair."""
    if settings.ssl_certfile is None:
        return None
    return ServerTls(settings.ssl_certfile, settings.ssl_keyfile)


def check_pair(certfile: Path, keyfile: Path | None) -> None:
    """Raises ConfigError unless a server can show the certificate and has its key."""
    _read_pair(certfile, certfile=certfile, keyfile=keyfile)


def _read_pair(_: Path, *, certfile: Path, keyfile: Path | None) -> _Pair:
    """Whichever of the two has changed. Raises ConfigError unless they fit."""
    pair = _read(certfile, "--ssl-certfile"), b"" if keyfile is None else _read(keyfile, "--ssl-keyfile")
    try:
        # Not the context that serves: what does not fit would be half in use there.
        _new_context().load_cert_chain(certfile, keyfile, password=_no_password)
    except OSError as error:  # ssl.SSLError is one
        key = "it" if keyfile is None else f"--ssl-keyfile {keyfile}"
        raise ConfigError(
            f"--ssl-certfile {certfile} needs a certificate in PEM, and its private key, not encrypted, in {key}: "
            f"{error.strerror or error}"
        ) from error
    return pair


def _end_s(pair: _Pair) -> float:
    """When the server's own certificate ends, which is the first one, in seconds since the epoch."""
    # Late: who serves HTTP needs none of it.
    from cryptography.x509 import InvalidVersion, load_pem_x509_certificates

    try:
        return load_pem_x509_certificates(pair[0])[0].not_valid_after_utc.timestamp()
    except (ValueError, InvalidVersion):
        return math.nan


def _read(path: Path, flag: str) -> bytes:
    try:
        return read_small_file(path)
    except OSError as error:
        raise ConfigError(f"{flag} {path} cannot be read: {error.strerror}") from error


def _new_context() -> ssl.SSLContext:
    """TLS 1.2 or later; clients show no certificate, but API keys."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    return context


def _no_password() -> str:
    """OpenSSL would ask for one on the terminal."""
    return ""
