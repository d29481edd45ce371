"""Feed-forward networks, the second half of a layer."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

from d2sd.modeling.config import BodyConfig

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
    """SwiGLU, or GeGLU."""

    def __init__(self, config: BodyConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self._gelu = config.activation == "gelu_tanh"

    def products(self) -> tuple[tuple[nn.Module, ...], ...]:
        return () if self._gelu else ((self.gate_proj, self.up_proj), (self.down_proj,))

    def packed(self, product: PackProduct) -> nn.Module:
        return PackedGeGLU(self, product) if self._gelu else self

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x)
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
        # in fp64 for the reason that `d2sd.modeling.experts` gives
        activated = F.gelu(gate(x).double(), approximate="tanh").to(x.dtype)
        return down(activated * up(x).to(x.dtype)).to(x.dtype)
