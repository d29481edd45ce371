"""Rows of the gated delta rule that are computed, and later committed."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

# Shape letters: B requests, T rows, Hk/Hv heads of keys and of values, Dk/Dv their sizes, L layers.

#: What falls back, in its report.
OP = "the gated delta rule"


@dataclass(frozen=True, slots=True)
class DeltaRows:
    """T rows of one layer without their queries: all of a verified tree that `commit_delta_rule` needs."""

    k: Tensor  # [B, T, Hk, Dk], before its norm. Value head h has key head h // (Hv / Hk)
    v: Tensor  # [B, T, Hv, Dv], of k's type
    g: Tensor  # [B, T, Hv] fp32, log of the gate, at most 0
    beta: Tensor  # [B, T, Hv] fp32 or k's type, how much of the new value is written, 0 .. 1
