"""What a server's log must not be silent about: one line each, or an error where the environment asks for one."""

from __future__ import annotations

import os
import sys

from d2sd.errors import D2SDError


def linear(reasons: list[str]) -> None:
    """Say that the first drafter drafts alone; raises `D2SDError` where `D2SD_TRTLLM=require` says that will not do."""
    told = "; ".join(reasons)
    if os.environ.get("D2SD_TRTLLM") == "require":
        raise D2SDError(
            "TensorRT-LLM cannot draft with both drafters here.", where="D2SD_TRTLLM=require", found=told,
            fix="d2sd trtllm check shows the whole table; without the variable the first drafter drafts alone",
        )  # fmt: skip
    say(f"LINEAR DFlash with the first drafter alone: {told} (d2sd trtllm check shows more)")


def say(text: str) -> None:
    """TensorRT-LLM's logger is among the things that may have changed."""
    print(f"d2sd: {text}", file=sys.stderr, flush=True)
