"""Scores of candidates behind their parents, by heads of first order, and the best chain by them.

    reference.py   the specification in plain PyTorch
    cpu.py         the same by the compiled library
    triton/        the kernel, a program a slot, and its launcher

Heads are in `d2sd.modeling.drafters.heads`.
"""

from __future__ import annotations

from d2sd.plugins import dispatch
from d2sd.plugins.pair_scores.cpu import conditioned_cpu
from d2sd.plugins.pair_scores.reference import Factors, conditioned_reference, factored, parents_of

__all__ = ["Factors", "conditioned", "factored", "parents_of"]

OP = "the scores of pairs"

conditioned = dispatch.op(
    OP, conditioned_reference, "d2sd.plugins.pair_scores.triton.kernels:conditioned_triton", library=conditioned_cpu
)
