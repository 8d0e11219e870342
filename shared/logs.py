"""Structured logs on standard error: one JSON object a line, or coloured text on a terminal."""

from __future__ import annotations

import logging
import sys

import structlog

from shared.types import ServiceName


def configure_logs(level: str, style: str, service: ServiceName | str, index: int) -> None:
    """Set up structlog for this process; style is `json`, `console` or `auto`."""
    console = style == "console" or (style == "auto" and sys.stderr.isatty())
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer() if console else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(level.upper())),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    structlog.contextvars.bind_contextvars(service=str(service), index=index)
