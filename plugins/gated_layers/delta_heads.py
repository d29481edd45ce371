"""Parameters of what comes between the projections of a gated delta net and the delta rule."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

# Shape letters: Hk/Hv heads of keys and of values, Dk/Dv their sizes, C channels and W taps of the convolution.


@dataclass(frozen=True, slots=True)
class DeltaHeads:
    """Geometry and parameters of one gated delta net."""

    keys: int  # Hk
    values: int  # Hv
    key_size: int  # Dk
    value_size: int  # Dv
    convolution: Tensor  # [C, W]
    decay: Tensor  # [Hv] fp32, -e^A
    bias: Tensor  # [Hv], of what `decay` is multiplied by
    #: Columns of the products are grouped by key heads (Qwen3-Next): q, k, and v and z of its value heads; b and a.
    grouped: bool = False
    scales: Tensor | None = None  # [4] fp32, of FP8 sums of q, k and v, of z, of b and of a

    @property
    def channels(self) -> int:
        """C."""
        return 2 * self.keys * self.key_size + self.values * self.value_size

    @property
    def gates(self) -> tuple[int, int, int]:
        """Where z is in the product: its first column, heads that are side by side, columns from those to the next."""
        if not self.grouped:
            return self.channels, self.values, 0
        group = self.values // self.keys
        first = 2 * self.key_size + group * self.value_size
        return first, group, first + group * self.value_size
