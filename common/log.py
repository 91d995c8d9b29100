"""Structured logs on stderr, one configuration per process. stdout belongs to the program's own output."""

import logging
import sys

import structlog

from common.config import LogSettings


def configure_logging(settings: LogSettings, *, process: str) -> None:
    """Routes structlog and the standard library to stderr; every line carries the process's name."""
    level = getattr(logging, settings.log_level.upper())
    text = settings.log_format == "text" or (settings.log_format == "auto" and sys.stderr.isatty())
    renderer = structlog.dev.ConsoleRenderer() if text else structlog.processors.JSONRenderer()
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso"),
    ]
    structlog.configure(
        processors=[*shared, structlog.processors.format_exc_info, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(processor=renderer, foreign_pre_chain=shared))
    logging.basicConfig(level=max(level, logging.WARNING), handlers=[handler], force=True)
    structlog.contextvars.bind_contextvars(process=process)
