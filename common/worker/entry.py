"""The first lines of a worker process: settings and refusals before anything heavy is imported."""

import asyncio
import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from common.config import WorkerSettings
from common.errors import STARTUP_EXIT_CODE, MoerelayError, StartupError
from common.log import configure_logging
from common.model.config import ModelConfig
from common.model.families import parse_config
from common.model.hub import resolve_model
from common.settings_loader import load_settings
from common.worker.machine import bound_memory, take_cores

SettingsT = TypeVar("SettingsT", bound=WorkerSettings)

#: Imports torch and serves; called only when settings and config.json are known to be good.
Serve = Callable[[SettingsT, Path, ModelConfig], Coroutine[Any, Any, None]]


def run_worker(cls: type[SettingsT], prog: str, argv: Sequence[str], load_serve: Callable[[], Serve[SettingsT]]) -> int:
    """Runs one worker to its end and returns the exit code; a StartupError is one line on stderr and code 2."""
    try:
        settings = load_settings(cls, argv, prog=prog)
        configure_logging(settings, process=settings.worker_id or prog)
        take_cores(settings)
        bound_memory()
        path = resolve_model(settings.model)
        config = parse_config(path)
        asyncio.run(load_serve()(settings, path, config))
    except MoerelayError as error:
        print(f"{prog}: error: {error.message}", file=sys.stderr)
        return STARTUP_EXIT_CODE if isinstance(error, StartupError) else 1
    return 0
