"""The first lines of a worker process: settings and refusals before anything heavy is imported."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from common.config import WorkerSettings
from common.log import configure_logging
from common.model.config import ModelConfig
from common.model.families import parse_config
from common.model.hub import resolve_model
from common.program import run_program
from common.settings_loader import load_settings
from common.worker.machine import bound_memory, take_cores

SettingsT = TypeVar("SettingsT", bound=WorkerSettings)

#: Imports torch and serves; called only when settings and config.json are known to be good.
Serve = Callable[[SettingsT, Path, ModelConfig], Coroutine[Any, Any, None]]


def run_worker(cls: type[SettingsT], prog: str, argv: Sequence[str], load_serve: Callable[[], Serve[SettingsT]]) -> int:
    """Runs one worker to its end and returns the exit code; a StartupError is one line on stderr and code 2."""
    return run_program(prog, partial(_run, cls, prog, argv, load_serve))


def _run(cls: type[SettingsT], prog: str, argv: Sequence[str], load_serve: Callable[[], Serve[SettingsT]]) -> int:
    settings = load_settings(cls, argv, prog=prog)
    configure_logging(settings, process=settings.worker_id or prog)
    take_cores(settings)
    bound_memory()
    path = resolve_model(settings.model)
    config = parse_config(path)
    asyncio.run(load_serve()(settings, path, config))
    return 0
