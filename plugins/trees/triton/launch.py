"""Launches the kernels of trees, by the arguments of the ops in reference/. Nothing here waits for the device: a CUDA
graph can capture it.
"""
# mypy: disable-error-code="no-untyped-def,import-untyped,import-not-found"

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2 as power

from d2sd.plugins.trees.triton.branches import blocks_kernel, boundaries_kernel, branches_kernel, restarts_kernel
from d2sd.plugins.trees.triton.growth import grow_kernel
from d2sd.plugins.trees.triton.nodes import accept_kernel, candidates_kernel, chain_kernel, mask_kernel
from d2sd.plugins.trees.types import PATH_BITS, ROW_BITS, Accepted, Branches, Source, Tree, lanes, path_bits

# Shape letters: B requests, N nodes, C candidates, G slots with the anchor, S without it, K branches, M candidates of a
# slot.


def outputs(tree: Tree) -> tuple[Tensor, ...]:
    """A tree's tensors in the order of the kernels' arguments."""
    return (
        tree.tokens,
        tree.parent,
        tree.depth,
        tree.branch_id,
        tree.valid,
        tree.score,
        tree.attn_mask,
        tree.num_merged,
    )


def tree_constants(nodes: int) -> dict[str, int]:
    padded = power(nodes)
    return {"N": nodes, "NP": padded, "TILE": min(padded, (4096 if padded <= 128 else 16384) // padded)}


def tree_warps(nodes: int) -> int:
    return 4 if nodes <= 128 else 8


def from_chain(tokens, score):
    batch, nodes = tokens.shape
    if tokens.stride(1) != 1 or score.stride(1) != 1:
        tokens, score = tokens.contiguous(), score.contiguous()
    out = Tree.empty(batch, nodes, tokens.device)
    with torch.cuda.device_of(tokens):  # type: ignore[no-untyped-call]  # Triton launches on the current device
        chain_kernel[(batch,)](
            tokens,
            score,
            *outputs(out),
            tokens.stride(0),
            score.stride(0),
            **tree_constants(nodes),
            num_warps=tree_warps(nodes),
        )
    return out


def candidates_constants(count: int, size: int) -> dict[str, int]:
    return {"C": count, "G": size, "CP": power(count), "GP": power(size)}


def candidates_warps(count: int, size: int, nodes: int) -> int:
    return max(tree_warps(nodes), 4 if power(count) * power(size) <= 512 else 8)


def from_candidates(candidates, score, budget):
    batch, count, size = candidates.shape
    out = Tree.empty(batch, budget, candidates.device)
    with torch.cuda.device_of(candidates):  # type: ignore[no-untyped-call]
        candidates_kernel[(batch,)](
            candidates.contiguous(),
            score.contiguous(),
            *outputs(out),
            **candidates_constants(count, size),
            **tree_constants(budget),
            num_warps=candidates_warps(count, size, budget),
        )
    return out


def branches_constants(slots: int, counts: Sequence[int]) -> dict[str, object]:
    """Constants of sources with these rows."""
    rows = {"FIRST": tuple(accumulate(counts, initial=0))[:-1], "COUNTS": tuple(counts)}
    return {"S": slots, **rows, **candidates_constants(sum(counts), 1 + slots)}


def merged_branches(anchor, sources, budget):
    """The tokens that branches keep may be broadcast."""
    counts, (*_, slots, _) = [source.rows for source in sources], sources[0].draft.tokens.shape
    out = Tree.empty(len(anchor), budget, anchor.device)
    top1, confidence = [], []
    for source in sources:
        of_rows = _rows_of_slots if source.branches is None else Tensor.contiguous
        top1.append(of_rows(source.draft.top1))
        confidence.append(of_rows(source.draft.confidence))
    kept = [None if s.branches is None else _rows_of_slots(s.branches.tokens) for s in sources]
    lengths = tuple(None if s.branches is None else s.branches.prefix_len.contiguous() for s in sources)
    strides = [tuple(0 if x is None else x.stride(0) for x in column) for column in (top1, confidence, kept)]
    strides.append(tuple(0 if x is None else x.stride(1) for x in kept))
    with torch.cuda.device_of(anchor):  # type: ignore[no-untyped-call]
        branches_kernel[(len(anchor),)](
            anchor,
            tuple(top1),
            tuple(confidence),
            tuple(kept),
            lengths,
            *outputs(out),
            *strides,
            **branches_constants(slots, counts),
            **tree_constants(budget),
            num_warps=candidates_warps(sum(counts), 1 + slots, budget),
        )
    return out


def _rows_of_slots(x: Tensor) -> Tensor:
    """With the slots, its last axis, side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


def boundaries_constants(slots: int, count: int) -> dict[str, int]:
    return {"S": slots, "SP": power(slots + 1), "K": count, "KP": power(count)}


def chain_branches(first, count):
    batch, slots = first.top1.shape
    top1, confidence = _rows_of_slots(first.top1), _rows_of_slots(first.confidence)
    prefix_len, rejected = torch.empty(2, batch, count, dtype=torch.long, device=top1.device).unbind(0)
    with torch.cuda.device_of(top1):  # type: ignore[no-untyped-call]
        boundaries_kernel[(batch,)](
            top1,
            confidence,
            prefix_len,
            rejected,
            top1.stride(0),
            confidence.stride(0),
            **boundaries_constants(slots, count),
            num_warps=1,
        )
    return Branches(first.top1[:, None].expand(-1, count, -1), prefix_len, rejected)


def branches_of_nodes(tree, first, count):
    top1, confidence = first.top1, first.confidence
    (batch, nodes), slots = tree.tokens.shape, top1.shape[1]
    kept = torch.empty(batch, count, slots, dtype=torch.long, device=top1.device)
    prefix_len, rejected = torch.empty(2, batch, count, dtype=torch.long, device=top1.device).unbind(0)
    with torch.cuda.device_of(top1):  # type: ignore[no-untyped-call]
        restarts_kernel[(batch,)](
            tree.tokens,
            tree.depth,
            tree.valid,
            tree.score,
            tree.attn_mask,
            top1,
            confidence,
            kept,
            prefix_len,
            rejected,
            *top1.stride(),
            *confidence.stride(),
            **restarts_constants(nodes, slots, count),
            num_warps=1 if nodes <= 32 else 4,
        )
    return Branches(kept, prefix_len, rejected)


def restarts_constants(nodes: int, slots: int, count: int) -> dict[str, int]:
    return {"S": slots, "SP": power(slots), "N": nodes, "NP": power(nodes), "K": count, "KP": power(count)}


def restart_blocks(branches, anchor, mask_token_id):
    kept = _rows_of_slots(branches.tokens)
    batch, count, slots = kept.shape
    blocks = torch.empty(batch, count, 1 + slots, dtype=torch.long, device=anchor.device)
    with torch.cuda.device_of(anchor):  # type: ignore[no-untyped-call]
        blocks_kernel[batch, count](
            anchor,
            kept,
            branches.prefix_len.contiguous(),
            blocks,
            kept.stride(0),
            kept.stride(1),
            mask_token_id,
            **blocks_constants(slots, count),
            num_warps=1,
        )
    return blocks


def blocks_constants(slots: int, count: int) -> dict[str, int]:
    return {"S": slots, "GP": power(slots + 1), "K": count}


def growth_constants(
    nodes: int,
    slots: int,
    widths: Sequence[int],
    counts: Sequence[int],
    lanes: Sequence[int],
    at_root: Sequence[bool],
    parents: Sequence[int],
    follows: Sequence[bool],
) -> dict[str, Any]:
    """Constants of sources with these candidates a slot, rows, lanes, whether they stand at the root, the parents that
    they tell apart, and whether they follow.
    """
    first = [0, *accumulate(counts)][:-1]
    sources = [*zip(first, counts, widths, lanes, parents, follows, strict=True)]
    number = lanes[-1] + 1
    wide = [power(max(w for w, own in zip(widths, lanes, strict=True) if own == lane)) for lane in range(number)]
    start = {lane: row + 1 for lane, row, here in reversed([*zip(lanes, first, at_root, strict=True)]) if here}
    entered = [0] * number
    for row, count, lane, here in zip(first, counts, lanes, at_root, strict=True):
        entered[lane] |= 0 if here else ((1 << count) - 1) << row
    bits = path_bits(number, sum(counts))
    assert bits <= PATH_BITS
    return {
        "SOURCES": tuple(sources),
        "START": sum(row << ROW_BITS * lane for lane, row in start.items()),
        "MOVES": any(follows) or not all(at_root),
        "WORD": tl.int32 if bits <= 32 else tl.int64,
        "MP": tuple(wide),
        "OFFSET": tuple(accumulate(wide, initial=0))[:-1],
        "LANES": tuple(entered),
        "P": max(32, power(sum(wide))),  # a thread reads what it has stored itself
        "DP": max(32, power(slots + 1)),
        "N": nodes,
        "NP": max(32, power(nodes)),
        "WARPS": 1 if nodes <= 256 else 4,  # one spills
    }


def _requests(x: Tensor) -> Tensor:
    """With the numbers of one request side by side."""
    return x if x[0].is_contiguous() else x.contiguous()


def best_first_tree(anchor, sources, rows):
    out = Tree.empty(len(anchor), rows, anchor.device)
    inputs, strides, constants, scratch = _growth(anchor, sources, rows)
    with torch.cuda.device_of(anchor):  # type: ignore[no-untyped-call]
        grow_kernel[(len(anchor),)](
            *inputs, *outputs(out), *scratch, *strides, **constants, num_warps=constants["WARPS"]
        )
    if rows > 64:
        mask_triton(out.parent, out.depth, out.valid, out.attn_mask)
    return out


def mask_triton(parent: Tensor, depth: Tensor, valid: Tensor, attn_mask: Tensor) -> None:
    """The tree mask [B, N, N] bool of parents and depths [B, N] int64 and of which nodes are valid [B, N] bool."""
    batch, nodes = parent.shape
    fixed = tree_constants(nodes)
    with torch.cuda.device_of(parent):  # type: ignore[no-untyped-call]
        grid = batch, -(-nodes // fixed["TILE"])
        mask_kernel[grid](parent, depth, valid, attn_mask, **fixed, num_warps=tree_warps(nodes))


def _growth(anchor: Tensor, sources: Sequence[Source], rows: int) -> tuple[Any, Any, dict[str, Any], Any]:
    """Arguments of a kernel that grows `rows` nodes: what it reads, strides and slots, constants, scratch memory."""
    batch, (*_, slots, _) = len(anchor), sources[0].draft.tokens.shape
    of_lanes, branches = lanes(sources), [source.branches for source in sources]
    tokens, table = [_requests(s.draft.tokens) for s in sources], [_requests(s.draft.table) for s in sources]
    kept = tuple(None if at is None else at.tokens.contiguous() for at in branches)
    prefix_len = tuple(None if at is None else at.prefix_len.contiguous() for at in branches)
    strides = (tuple(x.stride(0) for x in column) for column in (tokens, table))
    sizes = [x.shape[-1] for x in tokens], [source.rows for source in sources], of_lanes
    at_root, follows = [at is None for at in branches], [source.follows for source in sources]
    constants = growth_constants(rows, slots, *sizes, at_root, [x.shape[-2] for x in table], follows)
    keys = torch.empty(batch, rows, constants["P"], dtype=torch.int32, device=anchor.device)
    infos = None
    if constants["MOVES"] or len(constants["MP"]) > 1:
        infos = torch.empty_like(keys, dtype=torch.int32 if constants["WORD"] is tl.int32 else torch.long)
    inputs = anchor, tuple(tokens), tuple(table), kept, prefix_len
    return inputs, (*strides, slots), constants, (keys, infos)


def accept(tree, chosen, longest):
    batch, nodes = chosen.shape
    path = torch.empty(batch, longest, dtype=torch.long, device=chosen.device)
    packed = torch.empty(batch, 2 + longest, dtype=torch.long, device=chosen.device)
    columns = (x.contiguous() for x in (tree.tokens, tree.parent, tree.valid, tree.branch_id, chosen))
    with torch.cuda.device_of(chosen):  # type: ignore[no-untyped-call]
        accept_kernel[(batch,)](
            *columns, tree.rows, path, packed, **accept_constants(nodes, longest), num_warps=1 if nodes <= 256 else 4
        )
    return Accepted(path, packed[:, 0], packed[:, 2:], packed[:, 1], packed)


def accept_constants(nodes: int, longest: int) -> dict[str, int]:
    return {"N": nodes, "NP": power(nodes), "G": longest, "GP": power(longest)}
