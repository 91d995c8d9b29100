"""Commands that compute need packages that the router does not: the "worker" extra."""

from collections.abc import Iterator
from contextlib import contextmanager

from common.errors import ConfigError


@contextmanager
def needs_worker_extra(command: str) -> Iterator[None]:
    """Turns a module that is not installed into a ConfigError that says what to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigError(f"{command} needs the workers' packages: pip install 'moerelay[worker]' ({error})") from error
