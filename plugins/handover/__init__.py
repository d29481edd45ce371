"""The state that a step leaves on the device to the next: read before a step, and written after it.

    reference.py   the specification in plain PyTorch
    triton/        one program before a step and one after it, and their launchers

The state is [3, R] int64: of each row the anchor, the context length, and whether it is active. Besides it a step
leaves the features of the tokens that it commits, which drafters take.
"""

from __future__ import annotations

from d2sd.plugins.handover.reference import begin, commit, end

__all__ = ["begin", "commit", "end"]

# Shape letters: B requests, R rows of the state, G block size γ, S stop tokens, N nodes, F features of a node, M pages
# a request.
