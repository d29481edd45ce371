"""From logits to tokens: the target's choice after every row, and the candidates of a draft.

reference.py   the specification in plain PyTorch
cpu.py         the largest of a row, by the compiled library; the rest of the CPU path is the specification
triton/        the kernels and their launchers
"""

from __future__ import annotations

from d2sd.plugins.choice.reference import (
    WIDTH,
    SamplingTensors,
    best_token,
    candidates,
    choose,
    reads_any_type,
    sampled_scores,
)

__all__ = ["WIDTH", "SamplingTensors", "best_token", "candidates", "choose", "reads_any_type", "sampled_scores"]
