"""Feed-forward networks, the second half of a layer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

#: y = product(x) by a weight and a bias: `d2sd.modeling.native.packed_product`.
PackProduct = Callable[[Tensor, Tensor | None], Callable[[Tensor], Tensor]]


class FeedForward(nn.Module):
    """[..., E] -> [..., E]; a row's result depends on that row alone."""

    def products(self) -> tuple[tuple[nn.Module, ...], ...]:
        """The linear layers of a SwiGLU: gate and up, which have one input, and down.

        (): it has another form, and runs as it is between the kernels that join products.
        """
        return ()

    def packed(self, product: PackProduct) -> nn.Module:
        """Return the module that replaces it on a CPU at inference; linear layers are packed wherever they are."""
        return self


class MLP(FeedForward):
    """SwiGLU, or GeGLU. A packed one has its linear layers replaced, and activates in fp64."""

    def __init__(self, hidden: int, intermediate: int, *, gelu: bool = False) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)
        self._gelu, self._packed = gelu, False

    def products(self) -> tuple[tuple[nn.Module, ...], ...]:
        return () if self._gelu else ((self.gate_proj, self.up_proj), (self.down_proj,))

    def packed(self, product: PackProduct) -> nn.Module:
        self._packed = True
        return PackedGeGLU(self, product) if self._gelu else self

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x)
        if self._packed:
            gate = gate * sigmoid(gate)
        else:
            gate = F.gelu(gate, approximate="tanh") if self._gelu else F.silu(gate)
        out: Tensor = self.down_proj(gate * self.up_proj(x))
        return out


class PackedGeGLU(nn.Module):
    """A GeGLU of packed products; holds no parameters, so it cannot be trained or saved."""

    def __init__(self, mlp: MLP, product: PackProduct) -> None:
        super().__init__()
        parts = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        self._products = [product(part.weight.detach(), None) for part in parts]

    def forward(self, x: Tensor) -> Tensor:
        gate, up, down = self._products
        # in fp64 for the reason that `sigmoid` gives
        activated = F.gelu(gate(x).double(), approximate="tanh").to(x.dtype)
        return down(activated * up(x).to(x.dtype)).to(x.dtype)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """cap · tanh(x / cap) in fp32; on a CPU in fp64, for the reason that `sigmoid` gives."""
    wide = x.float() if x.is_cuda else x.double()
    return (cap * torch.tanh(wide / cap)).float()


def sigmoid(x: Tensor) -> Tensor:
    """PyTorch's vectors and what is left of them have different exponentials on a CPU, so that a row's bits would
    depend on where it stands. In fp64 they differ too, but not after rounding.
    """
    return torch.sigmoid(x) if x.is_cuda else torch.sigmoid(x.double()).to(x.dtype)
