"""Structured logs on stderr, one configuration per process. stdout belongs to the program's own output."""

import logging
import sys
from typing import TextIO, cast

import structlog
from structlog.typing import Processor

from common.config import LogSettings


class _Stderr:
    """What stderr is when something is written: beside a progress bar, what prints above it."""

    def write(self, text: str) -> int:
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


def configure_logging(settings: LogSettings, *, process: str) -> None:
    """Routes structlog and the standard library to stderr; every line carries the process's name."""
    level = getattr(logging, settings.log_level.upper())
    text = settings.log_format == "text" or (settings.log_format == "auto" and sys.stderr.isatty())
    stderr = _Stderr()
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso"),
    ]
    renderers = _text() if text else _json()
    structlog.configure(
        processors=[*shared, *renderers],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(cast("TextIO", stderr)),
        cache_logger_on_first_use=True,
    )
    without_meta = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    handler = logging.StreamHandler(stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=[without_meta, *renderers], foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name]
        )
    )
    logging.basicConfig(level=max(level, logging.WARNING), handlers=[handler], force=True)
    structlog.contextvars.bind_contextvars(process=process)


def _text() -> list[Processor]:
    """Lines for people. Tracebacks are plain: the decorated ones show local variables, hence prompts, by the page."""
    return [structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)]


def _json() -> list[Processor]:
    """One object per line, a traceback in its "exception"."""
    return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
