"""Where log records are written: among the messages of a command, or as lines of a server's log."""

from __future__ import annotations

import logging
import sys

from d2sd.io import printable


class _Message(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(f"{record.levelname.lower()}: {super().format(record)}")


def show_warnings() -> None:
    """Write warnings to stderr as a command's other messages, unless logs are set up (Python's last resort)."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_Message())


def log_to_stderr(lines: logging.Formatter, *names: str) -> None:
    """Write the logs of these packages to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(lines)
    for name in names:
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.INFO)
