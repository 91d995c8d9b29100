"""Who may call what, from the settings: keys of both kinds, where the control routes are, and browsers' origins."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from aiohttp import web

from common.config import ApiSettings, RouterSettings, UpSettings, is_loopback
from common.errors import ConfigError
from common.process import host_of
from common.security.exposure import check_http, exposed_worker
from common.security.key_file import KeyFile, watch_key_file
from common.security.watched_file import WatchedFile
from router.auth import KeyRing, listed_keys
from router.cors import Cors


@dataclass(frozen=True, slots=True)
class Access:
    """None for keys: nobody needs one. `files`: where they are from, to be looked at now and then."""

    keys: KeyRing | None
    admin_keys: KeyRing | None
    cors: Cors
    files: tuple[WatchedFile[list[str]], ...]

    @classmethod
    def of(cls, settings: RouterSettings | UpSettings) -> "Access":
        """Raises ConfigError if a file or an origin cannot be used, or something would be open to other machines."""
        if settings.admin_key_file is None:
            _check_open_control(settings)
        check_http(settings.host, has_keys=settings.api_key_file is not None, insecure=settings.insecure)
        keys, key_files = _watched(settings.api_key_file, "--api-key-file")
        admin_keys, admin_files = _watched(settings.admin_key_file, "--admin-key-file")
        return cls(keys, admin_keys, Cors(settings.cors_origin), key_files + admin_files)


def _watched(path: Path | None, flag: str) -> tuple[KeyRing | None, tuple[WatchedFile[list[str]], ...]]:
    """The keys of a file, which follow it, and the file."""
    if path is None:
        return None, ()
    ring = KeyRing([])
    file = WatchedFile(path, partial(listed_keys, flag=flag), ring.replace)
    ring.replace(file.value)
    return ring, (file,)


ACCESS = web.AppKey("access", Access)
#: Not there if the router has none.
CLUSTER_KEYS = web.AppKey("cluster_keys", WatchedFile[KeyFile])


def load_cluster_keys(settings: RouterSettings) -> WatchedFile[KeyFile] | None:
    """What the router shows to workers. Raises ConfigError if it has none and calls other machines."""
    if settings.cluster_key_file is not None:
        return watch_key_file(settings.cluster_key_file, "router")
    if not settings.insecure:
        _check_calls(settings)
    return None


def _check_calls(settings: RouterSettings) -> None:
    for flag, sources in (("--prefill", settings.prefill), ("--decode", settings.decode)):
        for source in sources:
            scheme, found, rest = source.partition("://")
            if scheme in ("srv", "file") and found:
                continue  # what they list is checked when it is known
            if reason := exposed_worker(host_of(rest if found else source)):
                raise ConfigError(f"{flag} {source}: {reason}")


def _check_open_control(settings: ApiSettings) -> None:
    if settings.admin_on_public_port:
        raise ConfigError(
            "--admin-on-public-port needs --admin-key-file: whoever reaches the port could stop the service"
        )
    if settings.admin_port is not None and not is_loopback(settings.admin_host):
        raise ConfigError(
            f"--admin-host {settings.admin_host} is reachable from other machines and needs --admin-key-file; "
            "without keys the control port listens on 127.0.0.1 only"
        )
