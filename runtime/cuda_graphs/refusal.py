"""Says that CUDA refuses to capture a graph, or that memory does not hold one, and what follows."""

from __future__ import annotations

import logging
import os

import torch

from d2sd.errors import D2SDError
from d2sd.plugins.dispatch import NO_FALLBACK

logger = logging.getLogger(__name__)


def lacks_memory(error: Exception) -> bool:
    """Whether a capture failed because its graph does not fit in memory."""
    return isinstance(error.__context__ or error, torch.OutOfMemoryError)


def warn_of_memory(what: str, error: Exception) -> None:
    """Say that these, of one shape, run without a graph: under `D2SD_NO_FALLBACK=1` too, since their kernels run."""
    first = f"{error.__context__ or error}".splitlines()[0]
    logger.warning("%s run without a CUDA graph, which does not fit in memory: %s", what, first)


def refuse(what: str, error: Exception) -> None:
    """Say that these, such as "decode steps", run without graphs; D2SDError where falling back is forbidden."""
    cause = error.__context__ or error  # the end of a failed capture raises an error of its own
    reason = f"{type(cause).__name__}: {cause}".splitlines()[0]
    if os.environ.get(NO_FALLBACK) == "1":
        raise D2SDError(
            f"The {what} cannot be captured as CUDA graphs.",
            where=f"{NO_FALLBACK}=1",
            found=reason,
            fix=f"unset {NO_FALLBACK} to launch their operators one by one, slower",
        ) from error
    logger.warning("%s run without CUDA graphs: %s", what, reason)
