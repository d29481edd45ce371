"""The accepted path, walked from the root by one program a request. The specification:
`d2sd.plugins.trees.accept`.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped,import-not-found"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def accept_kernel(
    tokens, parent, valid, branch_id, chosen, path, accepted, packed,
    N: tl.constexpr, NP: tl.constexpr, G: tl.constexpr, GP: tl.constexpr,
):  # fmt: skip
    """Grid (B). chosen: [B, N]. path, accepted: [B, G]; packed: [B, 2], length of the path and its last branch."""
    request = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, NP)
    inside = n < N
    at = request * N + n
    above = tl.load(parent + at, mask=inside, other=0).to(tl.int32)
    token = tl.load(tokens + at, mask=inside, other=0)
    agrees = inside & (n > 0) & (tl.load(valid + at, mask=inside, other=0) != 0)
    agrees = agrees & (token == tl.load(chosen + request * N + above, mask=inside, other=0))

    g = tl.arange(0, GP)
    nodes = g * 0
    last = 0
    count = 0
    node = 0
    while node < NP and count < G:
        nodes = tl.where(g == count, node, nodes)
        last = node
        count += 1
        node = tl.min(tl.where(agrees & (above == node), n, NP), axis=0)  # siblings differ: one at most
    tl.store(path + request * G + g, nodes, mask=g < G)
    choices = tl.load(chosen + request * N + nodes, mask=g < G, other=0)
    tl.store(accepted + request * G + g, choices, mask=g < G)
    tl.store(packed + request * 2, count)
    tl.store(packed + request * 2 + 1, tl.load(branch_id + request * N + last))
