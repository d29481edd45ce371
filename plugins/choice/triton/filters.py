"""The target's choice where a request of the batch filters, in two launches: `d2sd.plugins.choice.choose`.

    scores_kernel     (tokens.py) reads the logits once: the largest of every SEG neighbours, and a sum of exponentials
    filtered_kernel   finds the kept set among the segments that can matter, and chooses in it

Maxima and sums of segments bound the smallest logit that can be chosen from below:

    top-k    k segments have a maximum that large
    top-p    tokens that are smaller have less than 1 - p of the mass: a segment's is its sum, or, where its maximum is
             larger, at most SEG times the bound's and at most its sum without the maximum
    min-p    the bound is known

The tokens that are left are listed, and the kept set is found among them by integer masses, as in the specification.
For top-p alone the mass of the others is known up to `_error_of` only: where the kept set depends on more digits, the
row's masses are added one by one. So are they, and the search reads the row once a turn, where more than LIST tokens
are left: rows without a peak.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped,import-not-found"

from __future__ import annotations

import triton
import triton.language as tl

from d2sd.plugins.choice.triton.search import (
    LOG2_E,
    LOWEST,
    OF_NOTHING,
    largest_key,
    mass_limit,
    mass_of,
    smallest_key,
    value_of_key,
)
from d2sd.plugins.choice.triton.tokens import gumbel_of_run, gumbel_of_tokens, scale_of, store_chosen
from d2sd.plugins.shared.dependent_launch import dependent_kernel, wait_for_prior_kernels
from d2sd.plugins.shared.kernels import ABSENT, ascending_of, pack_entry, value_of

_UNIT = tl.constexpr(1099511627776.0)
#: Times 2^-8: how far below the best logit, divided by T, `_bound_of_mass` looks.
_DEPTH = tl.constexpr(32.0)


@triton.jit
def _scaled(row, token, vocab, heat):
    """Logits, and after division by T."""
    x = tl.load(row + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    return x, scale_of(x, heat)


@triton.jit
def _error_of(rest, scaled_best, vocab):
    """Relative error of a sum of exponentials of scaled logits against the specification's masses.

    Rounding: of logits / T, in the specification; of arguments, 3 units in the last place of their size, which weighted
    by mass is at most log(V / rest); of exponentials and of sums of 64 terms at most in a row.
    """
    depth = tl.log(vocab / tl.maximum(rest, 1e-12))
    return (2 * tl.abs(scaled_best) + 8 * depth + 64) * 5.9604644775390625e-08


@triton.jit
def _bound_of_mass(order, sums, at_best, best, scaled_best, heat, share, vocab, SEG: tl.constexpr):
    """The number below which the tokens certainly have less than 1 - share of the mass; -inf if none is found."""
    others = sums - at_best
    allowed = (1 - share) * tl.sum(sums, axis=0) * 0.9995
    low, high = 0.0, _DEPTH + 0.0
    for _ in range(8):
        middle = (low + high) * 0.5
        larger = order > ascending_of(best - middle * heat)
        below = tl.where(larger, tl.minimum(others, SEG * tl.exp2(-middle * LOG2_E)), sums)
        is_less = tl.sum(below, axis=0) * 1.0005 + vocab * 1e-12 < allowed
        low, high = tl.where(is_less, low, middle), tl.where(is_less, middle, high)
    # beyond, rounding of logits / T might be more than these margins
    found = (high < _DEPTH) & (tl.abs(scaled_best) < 1024)
    return tl.where(found, best - high * heat, float("-inf"))


@triton.jit
def _key_below(number, heat, SHIFT: tl.constexpr):
    """The key from which on no number, divided by T, may round to what this one does."""
    rounding = tl.abs(number) * 9.5e-07 if SHIFT == 0 else 0.0
    below = ascending_of(number - rounding - heat * 3e-45) >> SHIFT
    return tl.where(number > float("-inf"), below, LOWEST >> SHIFT)


@triton.jit
def _weight_above(
    row, vocab, heat, scaled_best, least, key, MASS: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr
):
    """The weight of the row's tokens above the key: a mass each, or 1; and the least order of those from the key on.

    `least` is the smallest order of scaled logits that counts.
    """
    weight = tl.zeros([BLOCK], tl.int64)
    smallest = tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
    for start in tl.range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x, scaled = _scaled(row, token, vocab, heat)
        order = ascending_of(scaled)
        found = ascending_of(x) >> SHIFT
        kept = (token < vocab) & (order >= least)
        weight += tl.where(kept & (found > key), mass_of(scaled, scaled_best) if MASS else 1, 0)
        smallest = tl.where(kept & (found >= key), tl.minimum(smallest, order), smallest)
    return tl.sum(weight, axis=0), tl.min(smallest, axis=0)


@triton.jit
def _least_by_turns(
    row, vocab, heat, scaled_best, least, most, share, low, high, SHIFT: tl.constexpr, BLOCK: tl.constexpr
):
    """The smallest order of scaled logits that is kept, of a row with too many tokens to list: each turn reads it."""
    if most < vocab:
        first, last = low.to(tl.int64), high.to(tl.int64)
        for _ in range(32 - SHIFT):
            if first < last:
                middle = last - ((last - first) >> 1)
                reaching, _least = _weight_above(
                    row, vocab, heat, scaled_best, LOWEST, (middle - 1).to(tl.int32), False, SHIFT, BLOCK
                )
                first = tl.where(reaching >= most, middle, first)
                last = tl.where(reaching >= most, last, middle - 1)
        _above, kept = _weight_above(row, vocab, heat, scaled_best, least, first.to(tl.int32), False, SHIFT, BLOCK)
        least = tl.maximum(least, kept)
    if share < 1:
        total, _least = _weight_above(row, vocab, heat, scaled_best, least, LOWEST >> SHIFT, True, SHIFT, BLOCK)
        limit = mass_limit(total, share)
        first, last = low.to(tl.int64), high.to(tl.int64)
        for _ in range(32 - SHIFT):
            if first < last:
                middle = first + ((last - first) >> 1)
                above, _least = _weight_above(
                    row, vocab, heat, scaled_best, least, middle.to(tl.int32), True, SHIFT, BLOCK
                )
                first = tl.where(above < limit, first, middle + 1)
                last = tl.where(above < limit, middle, last)
        _above, kept = _weight_above(row, vocab, heat, scaled_best, least, first.to(tl.int32), True, SHIFT, BLOCK)
        least = tl.maximum(least, kept)
    return least


@triton.jit
def _best_by_turns(row, vocab, heat, least, seed, position, BLOCK: tl.constexpr):
    """The entry of the best score among the row's tokens of these orders and above."""
    entry = tl.full([BLOCK], ABSENT, tl.int64)
    for start in tl.range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        _x, scaled = _scaled(row, token, vocab, heat)
        kept = (token < vocab) & (ascending_of(scaled) >= least)
        score = scaled + gumbel_of_run(seed, position, start, BLOCK)
        entry = tl.where(kept, tl.maximum(entry, pack_entry(score, token)), entry)
    return tl.max(entry, axis=0)


@triton.jit
def _chosen_of_list(
    listed, row, found, heat, scaled_best, least, most, share, rest, is_partial, low, high, seed, position,
    vocab, SIZE: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The entry of the best score among the listed tokens, at most SIZE, that the filters keep; and `least` of these.

    `rest`: the mass of all other tokens, in units of the likeliest one's, where `is_partial`; else they count nothing.
    """
    place = tl.arange(0, SIZE)
    inside = place < found
    entry = tl.load(listed + place, mask=inside, other=0)
    token = entry.to(tl.int32)
    x = tl.where(inside, (entry >> 32).to(tl.int32).to(tl.float32, bitcast=True), float("-inf"))
    key = tl.where(inside, ascending_of(x) >> SHIFT, LOWEST >> SHIFT)
    scaled = scale_of(x, heat)
    order = ascending_of(scaled)
    if most < vocab:
        kth = largest_key(key, most, low, high, SHIFT)
        least = tl.maximum(least, tl.min(tl.where(inside & (key >= kth), order, 0x7FFFFFFF), axis=0))
    kept = inside & (order >= least)
    if share < 1:
        weight = tl.where(kept, mass_of(scaled, scaled_best), 0)
        total = tl.sum(weight, axis=0)
        fewest, most_rest = tl.zeros([], tl.int64), tl.zeros([], tl.int64)
        if is_partial:
            error = _error_of(rest, scaled_best, vocab)
            fewest = tl.maximum((rest * (1 - error) * _UNIT).to(tl.int64) - vocab, 0)
            most_rest = (rest * (1 + error) * _UNIT).to(tl.int64) + vocab
        smallest = smallest_key(key, weight, mass_limit(total + fewest, share), low, high, SHIFT)
        if tl.sum(tl.where(key >= smallest, weight, 0), axis=0) < mass_limit(total + most_rest, share):
            total, _least = _weight_above(row, vocab, heat, scaled_best, least, LOWEST >> SHIFT, True, SHIFT, BLOCK)
            smallest = smallest_key(key, weight, mass_limit(total, share), low, high, SHIFT)
        least = tl.maximum(least, tl.min(tl.where(kept & (key >= smallest), order, 0x7FFFFFFF), axis=0))
        kept = inside & (order >= least)
    score = scaled + gumbel_of_tokens(seed, position, token)
    return tl.max(tl.where(kept, pack_entry(score, token), ABSENT), axis=0), least


@dependent_kernel
def filtered_kernel(
    logits, temperature, seed, context_len, depth, filtered, partial, maxima, sums, segments, entries, chosen,
    threshold, vocab, min_p, top_k, top_p,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, BLOCKSP: tl.constexpr, SEG: tl.constexpr, SEGMENTS: tl.constexpr,
    SEGMENTSP: tl.constexpr, TILE: tl.constexpr, FEW: tl.constexpr, LIST: tl.constexpr, SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (R). logits [R, V], of ROWS rows a request; partial [R, BLOCKS], maxima and sums [R, SEGMENTS] as
    `scores_kernel` makes them; min_p, top_k and top_p [B], off as in `SamplingTensors`.

    segments [R, SEGMENTS] int32 and entries [R, LIST] int64 are scratch memory. chosen [R] int64, -1 where the best
    score is not a finite number. threshold [R] int32 or None: the smallest order of scaled logits that is kept.
    """
    wait_for_prior_kernels()
    number = tl.program_id(0).to(tl.int64)
    request = number // ROWS
    row = logits + number * vocab
    heat = tl.load(temperature + request)
    least_share, most, share = tl.load(min_p + request), tl.load(top_k + request), tl.load(top_p + request)
    least = tl.full([], LOWEST, tl.int32)
    entry = tl.full([], ABSENT, tl.int64)
    if tl.load(filtered + request) != 0:
        n = tl.arange(0, SEGMENTSP)
        count = (vocab + SEG - 1) // SEG
        order = tl.load(maxima + number * SEGMENTS + n, mask=n < count, other=OF_NOTHING)
        keys = order >> SHIFT
        high = tl.max(order, axis=0)
        best = value_of(high)
        high = high >> SHIFT
        scaled_best = tl.div_rn(best, heat)
        if tl.abs(scaled_best) < float("inf"):  # false of NaN
            # -- the key from which on tokens can matter
            bound = tl.full([], float("-inf"), tl.float32)
            mass = tl.zeros([SEGMENTSP], tl.float32)
            if least_share > 0:
                by_share = scaled_best + tl.log(least_share)
                least = ascending_of(by_share)
                bound = (by_share - tl.abs(by_share) * 9.5e-07) * heat
                bound = bound - tl.abs(bound) * 9.5e-07
            if most < vocab:
                enough = most <= count
                low = tl.where(enough, tl.min(tl.where(n < count, keys, 0x7FFFFFFF), axis=0), LOWEST >> SHIFT)
                kth = largest_key(keys, most, low, tl.where(enough, high, low), SHIFT)
                bound = tl.where(enough, tl.maximum(bound, value_of_key(kth, SHIFT)), bound)
            is_partial = (share < 1) & (most >= vocab) & (least_share <= 0)
            if is_partial:
                factor = tl.exp2((value_of(order) - best) * (LOG2_E / heat))
                mass = tl.load(sums + number * SEGMENTS + n, mask=n < count, other=0.0) * factor
                bound = _bound_of_mass(order, mass, factor, best, scaled_best, heat, share, vocab, SEG)
            low = tl.minimum(_key_below(bound, heat, SHIFT), high)
            smallest = tl.where(low == LOWEST >> SHIFT, float("-inf"), value_of_key(low, SHIFT))
            # -- their segments
            active = (n < count) & (keys >= low)
            at = segments + number * SEGMENTS
            tl.store(at + tl.cumsum(active.to(tl.int32), axis=0) - 1, n, mask=active)
            rest = tl.sum(tl.where(active, 0.0, mass), axis=0)
            looked = tl.sum(active.to(tl.int32), axis=0)
            tl.debug_barrier()  # what other threads have stored
            # -- and they
            listed = entries + number * LIST
            found = tl.zeros([], tl.int32)
            others = tl.zeros([TILE, SEG], tl.float32)
            for first in tl.range(0, looked, TILE):
                place = first + tl.arange(0, TILE)
                segment = tl.load(at + place, mask=place < looked, other=count)
                token = segment[:, None] * SEG + tl.arange(0, SEG)[None, :]
                x = tl.load(row + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
                matters = (token < vocab) & (x >= smallest)
                in_segment = tl.cumsum(matters.to(tl.int32), axis=1)
                of_segment = tl.sum(matters.to(tl.int32), axis=1)
                before = found + tl.cumsum(of_segment, axis=0) - of_segment - 1
                to = tl.where(matters, before[:, None] + in_segment, LIST)
                bits = x.to(tl.int32, bitcast=True).to(tl.int64) << 32
                tl.store(listed + to, bits | token.to(tl.int64), mask=to < LIST)
                found += tl.sum(of_segment, axis=0)
                if is_partial:
                    others += tl.where(matters, 0.0, tl.exp2((x - best) * (LOG2_E / heat)))
            if is_partial:
                rest += tl.sum(tl.sum(others, axis=1), axis=0)
            tl.debug_barrier()
            its_seed = tl.load(seed + request)
            position = tl.load(context_len + request) + tl.load(depth + number) + 1
            if found <= FEW:
                entry, least = _chosen_of_list(
                    listed, row, found, heat, scaled_best, least, most, share, rest, is_partial, low, high,
                    its_seed, position, vocab, FEW, SHIFT, BLOCK,
                )  # fmt: skip
            elif found <= LIST:
                entry, least = _chosen_of_list(
                    listed, row, found, heat, scaled_best, least, most, share, rest, is_partial, low, high,
                    its_seed, position, vocab, LIST, SHIFT, BLOCK,
                )  # fmt: skip
            else:
                least = _least_by_turns(row, vocab, heat, scaled_best, least, most, share, low, high, SHIFT, BLOCK)
                entry = _best_by_turns(row, vocab, heat, least, its_seed, position, BLOCK)
    else:
        b = tl.arange(0, BLOCKSP)
        entry = tl.max(tl.load(partial + number * BLOCKS + b, mask=b < BLOCKS, other=ABSENT), axis=0)
    store_chosen(chosen + number, entry)
    if threshold is not None:
        tl.store(threshold + number, least)
