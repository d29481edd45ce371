"""From logits to tokens on CUDA: the target's choice after every row, and the candidates of a draft.

The specification and the CPU path are `d2sd.runtime.sampling.sample` and `d2sd.runtime.speculation.draft`, which ask
here whether a kernel takes their call.
"""

from __future__ import annotations

from torch import Tensor

from d2sd.plugins import dispatch


def use_kernels(logits: Tensor) -> bool:
    """Whether tokens are chosen by the kernels of `triton/`; see `dispatch.use_kernels`."""
    return dispatch.use_kernels(logits, "the choice of tokens")
