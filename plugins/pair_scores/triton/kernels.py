"""Scores of candidates behind their parents, in one launch. The specification: `d2sd.plugins.pair_scores`.

    a program a slot         δ and log-probabilities, and which candidate is the best behind each parent
    the last one of a block  follows the best through the slots, and puts parents and candidates in order

All slots are computed at once: a walk looks up which row each slot's best leads to, and computes nothing.
Nothing waits for the device: a CUDA graph can capture it.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped,import-not-found"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton import next_power_of_2 as power

from d2sd.plugins.choice.triton.search import LOWEST, exp
from d2sd.plugins.pair_scores.reference import MOST
from d2sd.plugins.shared.arrivals import comes_last
from d2sd.plugins.shared.dependent_launch import dependent_kernel, wait_for_prior_kernels
from d2sd.plugins.shared.kernels import ABSENT, ascending_of, pack_entry
from d2sd.plugins.trees.types import Draft

# Shape letters as in reference.py; capitals with P are sizes rounded up to powers of two, but P alone is 1 + M.

_MOST = tl.constexpr(MOST)
#: Fewest rows of a product that Triton makes, and numbers of one factor that are multiplied at once.
FEWEST, NUMBERS = 16, 2048
WARPS = 8
#: Pairs of candidates that a turn of the walk compares at once: 16 a thread.
PAIRS = 4096


@triton.jit
def _log1p(x):
    """Kahan's: the rounding of 1 + x and that of its logarithm cancel."""
    whole = 1.0 + x
    near = tl.log(whole) * tl.div_rn(x, tl.where(whole == 1.0, 1.0, whole - 1.0))
    return tl.where(whole == 1.0, x, near)


@triton.jit
def _log_sum(x, AXIS: tl.constexpr):
    """Logarithm of the sum of exponentials; -inf of nothing but -inf."""
    best = tl.max(x, axis=AXIS, keep_dims=True)
    base = tl.where(tl.abs(best) == float("inf"), 0.0, best)
    return base + tl.log(tl.sum(exp(x - base), axis=AXIS, keep_dims=True))


@triton.jit
def _log_add(one, other):
    """Logarithm of e^one + e^other, of which one is finite and none +inf."""
    most = tl.maximum(one, other)
    return most + _log1p(exp(tl.minimum(one, other) - most))


@dependent_kernel
def pairs_kernel(
    tokens, logprob, blocks, before, behind, of_slot, temperature, table, following, arrived, best_tokens,
    best_logprob, best_table, mask_token_id,
    SLOTS: tl.constexpr, BRANCHES: tl.constexpr, SIZE: tl.constexpr, M: tl.constexpr, MP: tl.constexpr,
    RANK: tl.constexpr, BLOCK: tl.constexpr, EACH: tl.constexpr, WIDTH: tl.constexpr, LINKSP: tl.constexpr,
    TURN: tl.constexpr,
):  # fmt: skip
    """Grid (B·K·S). tokens, logprob [B·K·S, M]; blocks [B·K, SIZE]; before, behind [V, RANK], with EACH `before`
    [B·K·S, P, RANK]; of_slot [B·K·S, RANK] or None; temperature [B]. table [B·K·S, P, M] fp32; following [B·K·S, P]
    int32: the row that the best of each row leads to in the slot behind; arrived [B·K] int32. best_tokens int64,
    best_logprob fp32 [B·K·S, WIDTH]; best_table [B·K·S, 1 + WIDTH, WIDTH] fp32 or None.
    """
    wait_for_prior_kernels()
    row = tl.program_id(0).to(tl.int64)
    block = row // SLOTS
    slot = row - block * SLOTS
    m = tl.arange(0, MP)
    inside = m < M
    shown = tl.load(blocks + block * SIZE + slot)
    is_known = shown != mask_token_id
    own = tl.load(tokens + row * M + m, mask=inside, other=0)
    if EACH:
        place = row * (M + 1) + tl.where(is_known, 0, m + 1)
    else:  # behind the anchor too there are rows for M candidates, all of them its own
        is_shown = is_known | (slot == 0)
        place = tl.where(is_shown, shown, tl.load(tokens + (row - 1) * M + m, mask=inside & (is_shown == 0), other=0))

    added = tl.zeros([MP, MP], tl.float32)
    for start in range(0, RANK, BLOCK):
        r = start + tl.arange(0, BLOCK)
        read = inside[:, None] & (r < RANK)[None, :]
        left = tl.load(before + place[:, None] * RANK + r[None, :], mask=read, other=0.0).to(tl.float32)
        if of_slot is not None:
            left *= tl.load(of_slot + row * RANK + r, mask=r < RANK, other=0.0).to(tl.float32)[None, :]
        right = tl.load(behind + own[:, None] * RANK + r[None, :], mask=read, other=0.0).to(tl.float32)
        added = tl.dot(left, tl.trans(right), added, input_precision="ieee")
    heat = tl.load(temperature + block // BRANCHES)
    added = tl.div_rn(added, tl.where(heat > 0, heat, 1.0) + tl.zeros_like(added))
    added = tl.where(inside[None, :], added, 0.0)

    given = tl.load(logprob + row * M + m, mask=inside, other=float("-inf"))[None, :]
    share = exp(_log_sum(given, 1))
    rest = _log1p(-tl.where(share > _MOST, _MOST, share))
    scores = given + added
    scores = tl.where(tl.abs(scores) < float("inf"), scores, float("-inf"))  # of NaN too
    says = tl.max((added != 0.0).to(tl.int32), axis=1, keep_dims=True) != 0
    found = tl.where(says, scores - _log_add(rest, _log_sum(scores, 1)), given)
    first = tl.where(is_known, found, given)  # of what is before the slot, in every row here
    at = table + row * ((M + 1) * M) + m[None, :]
    both = inside[:, None] & inside[None, :]
    tl.store(at + (m + 1)[:, None] * M, found, mask=both)
    tl.store(at + m[:, None] * M, first, mask=both & (m == 0)[:, None])

    leads_to = following + row * (M + 1)
    tl.store(leads_to + 1 + m, _first_of_best(found, inside, MP) + 1, mask=inside)
    tl.store(leads_to + m, _first_of_best(first, inside, MP) + 1, mask=m == 0)
    if comes_last(arrived + block, SLOTS):
        _walk(
            tokens, table, following, best_tokens, best_logprob, best_table, block * SLOTS,
            SLOTS, M, MP, WIDTH, LINKSP, TURN,
        )  # fmt: skip


@triton.jit
def _first_of_best(x, inside, MP: tl.constexpr):
    """The first of the largest numbers of each row; NaN is the largest."""
    order = tl.where(inside[None, :], ascending_of(x), LOWEST)
    best = tl.max(order, axis=1, keep_dims=True)
    return tl.min(tl.where((order == best) & inside[None, :], tl.arange(0, MP)[None, :], MP), axis=1)


@triton.jit
def _ranks(x, inside):
    """The place of each number in its row, largest first; of equal ones the first comes first."""
    entries = tl.where(inside[None, :], pack_entry(x, tl.arange(0, x.shape[1])[None, :]), ABSENT)
    return tl.sum((entries[:, None, :] > entries[:, :, None]).to(tl.int32), axis=2)


@triton.jit
def _walk(
    tokens, table, following, best_tokens, best_logprob, best_table, first,
    SLOTS: tl.constexpr, M: tl.constexpr, MP: tl.constexpr, WIDTH: tl.constexpr, LINKSP: tl.constexpr,
    TURN: tl.constexpr,
):  # fmt: skip
    """Puts the slots of a block, from row `first` on, in order, TURN of them at a time."""
    m, turn = tl.arange(0, MP), tl.arange(0, TURN)
    inside = m < M
    # All that the walk may look up is fetched at once; the links themselves are 1 or more.
    link, links = tl.arange(0, LINKSP), following + first * (M + 1)
    near = tl.load(links + link, mask=link < SLOTS * (M + 1), other=0)
    taken = tl.min(tl.minimum(near, 0), axis=0)
    earlier = 0  # not `taken`: the compiler takes variables that begin as one value for one
    for start in range(0, SLOTS, TURN):
        taken_of, earlier_of = tl.zeros([TURN], tl.int32), tl.zeros([TURN], tl.int32)
        for step in range(TURN):
            taken_of = tl.where(turn == step, taken, taken_of)
            earlier_of = tl.where(turn == step, earlier, earlier_of)
            earlier = taken
            taken = tl.load(links + (start + step) * (M + 1) + taken, mask=start + step < SLOTS, other=0)
        slot = start + turn
        row, read = first + slot, (slot < SLOTS)[:, None] & inside[None, :]
        here = table + row * ((M + 1) * M)
        own = tl.load(tokens + row[:, None] * M + m[None, :], mask=read, other=0)
        walk = tl.load((here + taken_of * M)[:, None] + m[None, :], mask=read, other=0.0)
        rank = _ranks(walk, inside)
        to, kept = row[:, None] * WIDTH + rank, read & (rank < WIDTH)
        tl.store(best_tokens + to, own, mask=kept)
        tl.store(best_logprob + to, walk, mask=kept)
        if best_table is not None:
            root = tl.load(here[:, None] + m[None, :], mask=read, other=0.0)
            both = read[:, None, :] & inside[None, :, None]
            rows = tl.load(here[:, None, None] + (m + 1)[None, :, None] * M + m[None, None, :], mask=both, other=0.0)
            back = here - tl.where(slot > 0, (M + 1) * M, 0)  # the first slot's rows are in its own order
            of_parents = tl.load((back + earlier_of * M)[:, None] + m[None, :], mask=read, other=0.0)
            place = _ranks(of_parents, inside)
            at = best_table + row * ((1 + WIDTH) * WIDTH)
            tl.store(at[:, None] + rank, root, mask=kept)
            to = at[:, None, None] + (place + 1)[:, :, None] * WIDTH + rank[:, None, :]
            tl.store(to, rows, mask=both & (place < WIDTH)[:, :, None] & (rank < WIDTH)[:, None, :])


def conditioned(blocks, draft, factors, mask_token_id, temperature, width, arrived=None):
    tokens, logprob, device = draft.tokens.contiguous(), draft.logprob.contiguous(), blocks.device
    batch, count, slots, size = tokens.shape
    rank, rows, padded = factors.behind.shape[1], batch * count * slots, max(FEWEST, power(size))
    is_chain, width = width == 1, min(width, size)
    table = torch.empty(rows, 1 + size, size, dtype=torch.float32, device=device)
    following = torch.empty(rows, 1 + size, dtype=torch.int32, device=device)
    best_tokens = torch.empty(batch, count, slots, width, dtype=torch.long, device=device)
    best_logprob = torch.empty(batch, count, slots, width, dtype=torch.float32, device=device)
    shape = batch, count, slots, 1 + width, width
    behind = None if is_chain else torch.empty(shape, dtype=torch.float32, device=device)
    parts = (None if x is None else x.contiguous() for x in (factors.before, factors.behind, factors.of_slot))
    if arrived is None or len(arrived) < batch * count:
        arrived = torch.zeros(batch * count, dtype=torch.int32, device=device)
    with torch.cuda.device_of(tokens):  # type: ignore[no-untyped-call]  # Triton launches on the current device
        pairs_kernel[(rows,)](
            tokens, logprob, blocks.contiguous(), *parts, temperature.contiguous(), table, following, arrived,
            best_tokens, best_logprob, behind, mask_token_id,
            SLOTS=slots, BRANCHES=count, SIZE=blocks.shape[2], M=size, MP=padded, RANK=rank,
            BLOCK=min(max(FEWEST, power(rank)), max(FEWEST, NUMBERS // padded)), EACH=factors.before.dim() > 2,
            WIDTH=width, LINKSP=power(slots * (1 + size)), TURN=min(power(slots), max(1, PAIRS // padded**2)),
            num_warps=WARPS,
        )  # fmt: skip
    return Draft(best_tokens, best_logprob, behind)
