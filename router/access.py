"""Who may call what, from the settings: keys of both kinds, where the control routes are, and browsers' origins."""

from dataclasses import dataclass

from common.config import ApiSettings, is_loopback
from common.errors import ConfigError
from router.auth import KeyRing, read_keys
from router.cors import Cors


@dataclass(frozen=True, slots=True)
class Access:
    """None for keys: nobody needs one."""

    keys: KeyRing | None
    admin_keys: KeyRing | None
    cors: Cors

    @classmethod
    def of(cls, settings: ApiSettings) -> "Access":
        """Raises ConfigError if a file or an origin cannot be used, or the control routes would be open to anybody."""
        if settings.admin_key_file is None:
            _check_open_control(settings)
        return cls(
            read_keys(settings.api_key_file, "--api-key-file"),
            read_keys(settings.admin_key_file, "--admin-key-file"),
            Cors(settings.cors_origin),
        )


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
