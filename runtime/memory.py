"""Number of pages in the K/V pools, and of recurrent states, from the limits and `limits.kv_memory`.

No torch: `build --plan` uses it too.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from d2sd.errors import RecipeError
from d2sd.runtime.request import Limits

#: Features of committed tokens that wait for a drafter (`DrafterContext`): drafters share what waits for several.
MAX_PENDING_BYTES = 64_000_000
#: Of the memory that running requests' states leave, the part that snapshots may take: 1 / this.
SNAPSHOT_SHARE = 4


def context_bytes(row_bytes: int, rows: int) -> int:
    """Most bytes for features of `row_bytes` a token on their way to the drafters' pages: a full queue, its rows in one
    tensor when it is flushed, what is computed of them, and the `rows` that a captured step leaves to the next.
    """
    return 3 * MAX_PENDING_BYTES + rows * row_bytes if row_bytes else 0


@dataclass(frozen=True, slots=True)
class KVMemory:
    """The size of the K/V pools of all models together and of the recurrent states, and the arithmetic behind it."""

    page_bytes: int  # K and V of one page, in the pools of all models
    full_pages: int  # pages of max_batch requests, each of max_context tokens and the tokens one step adds
    pages: int  # pages that requests can own: full_pages, or fewer if limits.kv_memory holds fewer
    windowed_page_bytes: int = 0  # of layers with a window, which have pages of their own: not in `page_bytes`
    windowed_pages: int = 0  # of these, that requests can own
    state_bytes: int = 0  # recurrent state of one request, of all layers that have one
    states: int = 0  # state 0, max_batch requests', and snapshots of the prefix cache

    @property
    def pool_pages(self) -> int:
        """Pages in each pool, including the scratch page 0."""
        return 1 + self.pages

    @property
    def windowed_pool_pages(self) -> int | None:
        """Pages of the pool of layers with a window; None if they have no pages of their own."""
        return 1 + self.windowed_pages if self.windowed_page_bytes else None

    @property
    def total_bytes(self) -> int:
        pages = self.pool_pages * self.page_bytes + (self.windowed_pool_pages or 0) * self.windowed_page_bytes
        return pages + self.states * self.state_bytes


@dataclass(frozen=True, slots=True)
class WindowedLayers:
    """The layers of all models that have a window."""

    window: int  # the longest
    page_bytes: int  # K and V of one page, in these layers

    def pages(self, limits: Limits, block_size: int) -> int:
        """Most pages that one request has of them: those behind the window are freed."""
        return min(limits.pages_for(limits.max_context + block_size), limits.pages_within(self.window, block_size))


@dataclass(frozen=True, slots=True)
class PoolBytes:
    """Bytes that all models together have in their pools."""

    page: int  # K and V of one page
    windowed: WindowedLayers | None = None  # whose part of a page can be in pages of their own
    state: int = 0  # recurrent state of one request; 0: there is none


def plan_kv_memory(limits: Limits, block_size: int, each: PoolBytes, free_bytes: int | None = None) -> KVMemory:
    """Turn limits into a number of pages; `block_size` is the most tokens that a step adds to a request.

    Of a page, the part of layers with a window is in pages of their own: as many as max_batch requests have, and never
    more than of the other layers, of which a request has as many at least. A recurrent state is there for each of
    max_batch requests, and with the prefix cache for up to as many snapshots.

    A share in `limits.kv_memory` is multiplied by `free_bytes`; without it a share is ignored, so the result is an
    upper bound. With fewer pages than requests need, the scheduler preempts the newest request and recomputes it later.
    Raises RecipeError if `limits.kv_memory` does not hold one step of one request, and the states of max_batch.
    """
    full = limits.max_batch * limits.pages_for(limits.max_context + block_size)
    windowed, page_bytes, state_bytes, within, most = each.windowed, each.page, each.state, 0, 0
    if windowed is not None:
        within, most = windowed.page_bytes, limits.max_batch * windowed.pages(limits, block_size)
    whole = page_bytes - within
    least, snapshots = 1 + limits.max_batch if state_bytes else 0, limits.max_batch * limits.prefix_cache
    budget = limits.kv_memory
    if isinstance(budget, float):
        budget = None if free_bytes is None else int(budget * free_bytes)
    if budget is None:
        states = least + snapshots if state_bytes else 0
        return KVMemory(whole, full, full, within, most, state_bytes, states)
    needed = limits.pages_for(1 + block_size)
    spare = budget - least * state_bytes - (1 + needed) * page_bytes
    if spare < 0:
        raise _too_little(budget, (1 + needed) * page_bytes, least, state_bytes)
    states = least
    if state_bytes:
        left = budget - least * state_bytes
        states += min(snapshots, left // SNAPSHOT_SHARE // state_bytes, spare // state_bytes)
    budget -= states * state_bytes
    pages = budget // page_bytes - 1  # less the scratch page
    if windowed is not None and pages >= most:
        pages = (budget - (1 + most) * within) // whole - 1 if whole else full
    pages = min(full, pages)
    return KVMemory(whole, full, pages, within, min(most, pages), state_bytes, states)


def _too_little(budget: int, pages: int, count: int, state_bytes: int) -> RecipeError:
    """The error that `budget` fits neither the `pages` of one request nor, with them, the `count` states of all."""
    states = f", {count * state_bytes:,} of them for the states of {count - 1} requests and slot 0" if count else ""
    return RecipeError(
        "The K/V memory does not hold a single request.",
        where="limits.kv_memory",
        found=f"{budget:,} bytes",
        expected=f"at least {pages + count * state_bytes:,} bytes{states}",
        fix="raise it, or lower limits.max_batch" if count else "raise it, or lower limits.page_size",
    )


def free_memory(device: str) -> int:
    """Bytes that can be allocated on `device` now: of the GPU, or of the host (Linux's MemAvailable).

    Raises RecipeError if the system does not report it.
    """
    if device.startswith("cuda"):
        import torch

        torch.cuda.empty_cache()  # blocks that PyTorch caches count as used
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text("ascii").splitlines())
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        raise RecipeError(
            "The free memory of this host is unknown.", where="limits.kv_memory", fix="give bytes, such as 4GiB"
        ) from None
