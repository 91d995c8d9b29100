"""What `moerelay up` looks at before it starts anything: mistakes that a process would find after it has begun."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from common.config import UpSettings
from common.errors import ConfigError
from common.process import MAX_SOCKET_PATH_BYTES
from common.security.tls import check_pair
from deploy.doctor.ports import Wanted, check_ports
from deploy.extras import needs_worker_extra
from router.access import Access


def checked(settings: UpSettings) -> UpSettings:
    """`settings` that a cluster can be started with, with the checkpoint's directory for its name.

    Raises:
        StartupError: it could not; the message names the flag and the fix.
    """
    Access.of(settings)
    if settings.ssl_certfile is not None:
        check_pair(settings.ssl_certfile, settings.ssl_keyfile)
    check_listening(settings)
    check_router_sockets(settings.router_processes, Path(tempfile.gettempdir()))
    with needs_worker_extra("up"):
        from common.model.hub import resolve_model

        if settings.device == "cuda":
            from common.model.numerics import resolve_device  # late: imports torch, which takes a second

            resolve_device(settings.device)
        return with_local_model(settings, resolve_model)


def check_listening(settings: UpSettings) -> None:
    """Raises ConfigError if the router could not listen on its ports; it may still lose a race."""
    wanted = [Wanted("--port", settings.host, settings.port)]
    if settings.admin_port is not None:
        wanted.append(Wanted("--admin-port", settings.admin_host, settings.admin_port, "--admin-host"))
    for check in check_ports(wanted):
        if check.verdict == "bad":
            raise ConfigError(check.told)


def check_router_sockets(router_processes: int, temporary: Path) -> None:
    """Finds out before the weights are loaded whether several router processes can talk to each other.

    Args:
        temporary: where temporary directories are made.

    Raises:
        ConfigError: the paths of their sockets would be too long.
    """
    if router_processes < 2:
        return
    from router.processes.place import DIRECTORY_PREFIX
    from router.processes.siblings import socket_path

    # As many letters as `tempfile` adds.
    path = socket_path(temporary / f"{DIRECTORY_PREFIX}xxxxxxxx", router_processes - 1)
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        raise ConfigError(
            f"--router-processes {router_processes} needs sockets such as {path}, which is longer than "
            f"{MAX_SOCKET_PATH_BYTES} bytes; set TMPDIR to a shorter path"
        )


def with_local_model(settings: UpSettings, resolve: Callable[[str], Path]) -> UpSettings:
    """`settings` with the checkpoint's directory for a model, found (or downloaded) once instead of by every child.

    What clients see stays the hub id, or the directory's name. A model that the workers would refuse is refused here,
    and so is a context that it, or the KV cache, is too small for.

    Raises:
        CheckpointError: there is no such checkpoint, or it is not supported.
        ConfigError: a setting does not fit it.
    """
    from common.model.dtype import DTYPE_BYTES, dtype_name
    from common.model.families import parse_config
    from common.worker.context import blocks_and_context

    path = Path(os.path.abspath(resolve(settings.model)))
    config = parse_config(path)
    blocks_and_context(settings, config, DTYPE_BYTES[dtype_name(settings.dtype, config)])
    is_local = Path(settings.model).expanduser().is_dir()
    name = settings.served_model_name or (path.name if is_local else settings.model)
    return settings.model_copy(update={"model": str(path), "served_model_name": name})
