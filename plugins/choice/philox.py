"""Gumbel noise as a function of (seed, position, token): without generator state, the order of calls has no effect.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), the generator of cuRAND,
PyTorch on CUDA and `triton.language.philox`. Key = the 64-bit seed; counter = (token // 4, position, 0, 0); word
token % 4 is the token's. All rows at one position share their noise, so the target chooses the same token in every
tree.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF


def philox(
    key: tuple[Tensor, Tensor], counter: tuple[Tensor, Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ten rounds on 32-bit words in int64; tensors broadcast. Products wrap, but both 32-bit halves stay exact."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(10):
        low, high = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (high >> 32 & _LOW) ^ c1 ^ k0, high & _LOW, (low >> 32 & _LOW) ^ c3 ^ k1, low & _LOW
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return c0, c1, c2, c3


def gumbel(seed: Tensor, position: Tensor, vocab_size: int) -> Tensor:
    """seed [B], position [B, D], both int64 (a seed's 64 bits) -> Gumbel(0, 1) noise [B, D, V] in fp32."""
    quads = torch.arange((vocab_size + 3) // 4, device=seed.device)
    key = ((seed & _LOW)[:, None, None], (seed >> 32 & _LOW)[:, None, None])
    zero = torch.zeros((), dtype=torch.int64, device=seed.device)
    words = philox(key, (quads, position[..., None], zero, zero))
    return _gumbel(torch.stack(words, dim=-1).flatten(-2)[..., :vocab_size])


def gumbel_at(seed: Tensor, position: Tensor, token: Tensor) -> Tensor:
    """The same noise for single tokens: seed [B], position and token [B, ...] of one shape -> fp32 of that shape."""
    seed = seed.view(-1, *[1] * (token.dim() - 1))
    zero = torch.zeros((), dtype=torch.int64, device=seed.device)
    words = philox((seed & _LOW, seed >> 32 & _LOW), (token // 4, position, zero, zero))
    return _gumbel(torch.stack(words, dim=-1).gather(-1, (token % 4)[..., None])[..., 0])


def _gumbel(bits: Tensor) -> Tensor:
    # 23 bits plus one half are exact in fp32, so 0 and 1 are never reached and the noise stays finite.
    uniform = ((bits >> 9).float() + 0.5) * 2.0**-23
    return -(-uniform.log()).log()
