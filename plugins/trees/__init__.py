"""Draft trees on CUDA: growing and merging one, and accepting along it, as one program a request.

The specification and the CPU path are `d2sd.runtime.speculation.{tree,growth,accept}`, which ask here whether a kernel
takes their call. Results are theirs to the bit; of nodes with equal scores, which `topk` gives in any order, the kernel
takes the one of the better parent first, then the earlier candidate.
"""

from __future__ import annotations

from torch import Tensor

from d2sd.plugins import dispatch

#: Branches of one tree: a bit each in a word of 64.
MOST_BRANCHES = 62


def use_kernels(x: Tensor, branches: int = 0) -> bool:
    """Whether trees over tensors like `x` are made by the kernels of `triton/`; see `dispatch.use_kernels`."""
    reason = None if branches <= MOST_BRANCHES else f"{branches} branches, more than {MOST_BRANCHES}"
    return dispatch.use_kernels(x, "the draft tree", reason)
