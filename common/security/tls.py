"""TLS for clients of the HTTP port: a certificate and its key, from files that may be replaced at any time."""

import ssl
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog

from common.config import ApiSettings
from common.errors import ConfigError
from common.security.watched_file import WatchedFile
from common.small_file import read_small_file

log = structlog.get_logger()

#: Contents of both files; without a key file, the certificate's holds the key, too.
_Pair = tuple[bytes, bytes]


@dataclass(frozen=True, slots=True)
class ServerTls:
    """`context` serves; `files`, to be looked at now and then, keep it up to date for connections to come."""

    context: ssl.SSLContext
    files: tuple[WatchedFile[_Pair], ...]


def load_tls(settings: ApiSettings) -> ServerTls | None:
    """None if the port is to speak plain HTTP. Raises ConfigError if the files are no pair."""
    certfile, keyfile = settings.ssl_certfile, settings.ssl_keyfile
    if certfile is None:
        return None
    check_pair(certfile, keyfile)
    context = _new_context()
    context.load_cert_chain(certfile, keyfile, password=_no_password)

    def use(_: _Pair) -> None:
        try:
            context.load_cert_chain(certfile, keyfile, password=_no_password)
        except OSError as error:  # the files have changed once more; what they are now is looked at next
            log.error("certificate_unusable", reason=str(error))

    read = partial(_read_pair, certfile=certfile, keyfile=keyfile)
    watched = (certfile,) if keyfile is None else (certfile, keyfile)
    return ServerTls(context, tuple(WatchedFile(path, read, use) for path in watched))


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
