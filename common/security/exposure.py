"""What may listen beyond this machine, or call out of it: nothing without keys, unless `--insecure` says so."""

from common.config import is_loopback
from common.errors import ConfigError

HOW_TO_MAKE_KEYS = "`moerelay keys init` makes such files"


def check_http(host: str, *, has_keys: bool, insecure: bool) -> None:
    """Of the HTTP port. Raises ConfigError."""
    if not (has_keys or insecure or is_loopback(host)):
        raise ConfigError(
            f"--host {host} is reachable from other machines and needs --api-key-file ({HOW_TO_MAKE_KEYS}); "
            "with --insecure it serves anybody"
        )


def check_grpc(host: str, *, has_keys: bool, insecure: bool) -> None:
    """Of a worker's port, where whoever reaches it could run, read and stop everything. Raises ConfigError."""
    if not (has_keys or insecure or is_loopback(host)):
        raise ConfigError(
            f"--host {host} is reachable from other machines and needs --cluster-key-file ({HOW_TO_MAKE_KEYS}); "
            "with --insecure it obeys anybody"
        )


def check_handoff(host: str, *, has_keys: bool, insecure: bool) -> None:
    """Of a decode worker's handoff port. Raises ConfigError."""
    if not (has_keys or insecure or is_loopback(host)):
        raise ConfigError(
            f"--handoff-endpoint at {host} is reachable from other machines and needs --cluster-key-file "
            f"({HOW_TO_MAKE_KEYS}); with --insecure it takes KV from anybody"
        )


def exposed_worker(host: str) -> str | None:
    """Why a router without keys must not call a worker there; None: it may."""
    if is_loopback(host):
        return None
    return f"{host} is another machine, and calls to it need --cluster-key-file ({HOW_TO_MAKE_KEYS}), or --insecure"
