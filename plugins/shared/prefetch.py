"""Memory that a kernel asks for before it waits for the kernels before, which keep memory idle meanwhile.

A prefetch into the L2 cache, one for all of the GPU, changes neither a register nor what any kernel reads. So it may
precede `wait_for_prior_kernels()`, as a load may not, even if a kernel before writes these bytes.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped,import-not-found"

from __future__ import annotations

import triton
import triton.language as tl

_COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)  # the interpreter has no assembly


@triton.jit
def prefetch(addresses, BYTES: tl.constexpr):
    """Asks for BYTES behind each of these addresses [N], multiples of 16. Nothing on architectures before 9.0, where no
    launch is dependent.
    """
    if _COMPILED and tl.target_info.cuda_capability_geq(9, 0):
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;",
            "=r,l,r",
            [addresses.to(tl.uint64), BYTES],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
