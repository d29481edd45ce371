"""Scores of candidates behind their parents, by heads of first order, and the best chain by them.

    reference.py   the specification in plain PyTorch
    cpu.py         the same by the compiled library
    triton/        the kernel, a program a slot, and its launcher

Heads are in `d2sd.modeling.drafters.heads`.
"""

from __future__ import annotations

from d2sd.plugins.pair_scores.reference import Factors, conditioned, factored, parents_of

__all__ = ["Factors", "conditioned", "factored", "parents_of"]
