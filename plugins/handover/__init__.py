"""The state that a captured step leaves to the next, on CUDA: one program before a step, and one after it.

The specification is `d2sd.runtime.cuda_graphs.handover`, which asks here whether a kernel takes its call.
"""

from __future__ import annotations

from torch import Tensor

from d2sd.plugins import dispatch


def use_kernels(x: Tensor) -> bool:
    """Whether the handover of steps over tensors like `x` is made by the kernels of `triton/`."""
    return dispatch.use_kernels(x, "the handover of steps")
