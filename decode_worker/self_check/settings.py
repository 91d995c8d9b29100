"""From the settings of a decode worker to what checks its requests."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from common.config import DecodeSettings
from common.errors import ConfigError
from common.worker.core import WorkerCore
from decode_worker.self_check.checker import SelfCheck
from decode_worker.self_check.reproducer import ReproducerFiles


@asynccontextmanager
async def checking(settings: DecodeSettings, core: WorkerCore) -> AsyncIterator[SelfCheck | None]:
    """None where nothing is to be checked. To be entered before the engine starts, and left after it has stopped.

    Raises:
        ConfigError: a solo run would prove nothing here, or the directory cannot be written to.
    """
    if not settings.self_check_rate:
        yield None
        return
    if not core.exact:
        raise ConfigError(
            "--self-check-rate: this device does not promise bitwise equality, so every check could fail; leave it out"
        )
    directory, files = settings.self_check_dir, None
    if directory is not None:
        files = ReproducerFiles(directory, settings.self_check_files)
    check = SelfCheck(core, settings.self_check_rate, max_tokens=settings.self_check_max_tokens, files=files)
    try:
        yield check
    finally:
        check.close()
