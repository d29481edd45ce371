"""The memory of a plan in words, as (label, text) lines."""

from __future__ import annotations

from collections.abc import Iterator

from d2sd.build.plan import GPUS, Plan
from d2sd.io import size_text


def kv_lines(plan: Plan) -> Iterator[tuple[str, str]]:
    """The arithmetic of the pools."""
    limits, memory = plan.recipe.limits, plan.kv_memory()
    size = f"pages of {limits.page_size} tokens, {memory.page_bytes:,} B each in all models"
    yield ("K/V pages", f"{memory.pages:,} {size}; page 0 takes padding: {size_text(memory.total_bytes)}")
    block = plan.recipe.tree.block_size
    needed = f"{limits.max_batch} requests of {limits.max_context} + {block} tokens fill {memory.full_pages:,}"
    if isinstance(limits.kv_memory, float):
        yield ("", f"{needed}; at most {limits.kv_memory:g} of the memory that is free when serving starts")
    elif memory.pages < memory.full_pages:
        yield ("", f"{needed}; limits.kv_memory holds fewer, so requests are preempted when pages run out")
    else:
        yield ("", needed)


def gpu_lines(plan: Plan) -> Iterator[tuple[str, str]]:
    """Memory of weights and K/V only: activations, logits and the CUDA context need more."""
    limits = plan.recipe.limits
    yield ("a request", f"{size_text(plan.request_bytes)} of K/V for {limits.max_context:,} tokens")
    for name, memory in GPUS.items():
        pool = plan.kv_memory().total_bytes
        if isinstance(limits.kv_memory, float):
            pool = min(pool, int(limits.kv_memory * max(0, memory - plan.weight_bytes)))
        needed = plan.weight_bytes + pool
        left = f"{size_text(memory - needed)} left" if needed < memory else f"{size_text(needed - memory)} too much"
        most = f"the weights and {plan.requests_in(memory):,} such requests"
        yield (f"{name} {memory // 10**9} GB", f"{left}; four fifths of it hold {most}")
