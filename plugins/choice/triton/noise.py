"""Gumbel noise in registers: the integers are those of `d2sd.plugins.choice.reference`, bit for bit."""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped,import-not-found"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def philox_words(seed, position, quad):
    """The words of four tokens each: seed and position are scalars or shaped as `quad`, the tokens' number // 4."""
    c0 = quad.to(tl.uint32)
    c1 = (c0 * 0).to(tl.uint32) + position.to(tl.uint32)
    c2, c3 = c1 * 0, c1 * 0
    k0 = c2 + (seed & 0xFFFFFFFF).to(tl.uint32)
    k1 = c2 + ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    for _ in tl.static_range(10):
        low = c0.to(tl.uint64) * 0xD2511F53
        high = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (high >> 32).to(tl.uint32) ^ c1 ^ k0
        c1 = (high & 0xFFFFFFFF).to(tl.uint32)
        c2 = (low >> 32).to(tl.uint32) ^ c3 ^ k1
        c3 = (low & 0xFFFFFFFF).to(tl.uint32)
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def _gumbel(bits):
    uniform = ((bits >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07  # 2^-23
    return -tl.log(-tl.log(uniform))


@triton.jit
def gumbel_of_run(seed, position, first, SIZE: tl.constexpr):
    """Noise of the tokens first .. first + SIZE; both are multiples of 4."""
    quad = first // 4 + tl.arange(0, SIZE // 4)
    w0, w1, w2, w3 = philox_words(seed, position, quad)
    return _gumbel(tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [SIZE]))


@triton.jit
def gumbel_of_tokens(seed, position, token):
    """Noise of single tokens."""
    w0, w1, w2, w3 = philox_words(seed, position, token // 4)
    word = token % 4
    return _gumbel(tl.where(word == 0, w0, tl.where(word == 1, w1, tl.where(word == 2, w2, w3))))
