"""Programs that each store a part, and the last of them to come, which goes on with all parts in the same launch.

An addition releases what a program has stored, and acquires what those that added before it have. Additions to one
counter have one order, so exactly one program finds that all others have come, and it waits for none. It takes the
count back: the counter is 0 for the next launch, or a graph's replay, which begins behind the end of this one.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped,import-not-found"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def comes_last(arrived, COUNT: tl.constexpr):
    """Whether this program is the last of COUNT to ask, which may read what the others had stored when they asked."""
    tl.debug_barrier()  # one thread announces the stores of all
    is_last = tl.atomic_add(arrived, 1, sem="acq_rel") == COUNT - 1
    if is_last:
        tl.atomic_add(arrived, -COUNT, sem="relaxed")
    return is_last
