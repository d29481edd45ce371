"""The custom operators that the path calls, with TensorRT-LLM's names and schemas, as loops over requests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from d2sd.modeling.kv_pool import KVPool

# Shape letters: G generations, N nodes, P = S + 1 nodes of the longest path, V vocabulary.

_LIBRARY: Any = torch.library.Library
_TRTLLM = _LIBRARY("trtllm", "DEF")
_TENSORRT_LLM = _LIBRARY("tensorrt_llm", "DEF")
_TRTLLM.define(
    "verify_dynamic_tree_greedy_out_packed_op(Tensor candidates, Tensor retrievePacked, Tensor targetPredict, "
    "Tensor(a!) acceptIndex, Tensor(b!) acceptTokenNum, Tensor(c!) acceptToken, Tensor treeValid, int numSpecStep) "
    "-> ()"
)
_TRTLLM.define(
    "verify_dynamic_tree_rejection_out_op(Tensor draftTokens, Tensor targetProbs, Tensor retrieveNextToken, "
    "Tensor retrieveNextSibling, Tensor treeValid, Tensor(a!) acceptIndex, Tensor(b!) acceptTokenNum, "
    "Tensor(c!) acceptToken, int numSpecStep, Tensor seed, Tensor offset) -> ()"
)
_TENSORRT_LLM.define(
    "update_kv_cache_draft_token_location_2d(Tensor indices, Tensor num_accepted, Tensor past_kv_lens, bool use_paged, "
    "int layer_count, int num_kv_heads, int head_size_bytes, int rewind, int max_kv_len, Tensor pointer_array, "
    "Tensor offset_array, int max_blocks_per_seq, int tokens_per_block, Tensor? stream) -> ()"
)
#: K/V by the number that stands for its address.
POOLS: dict[int, KVPool] = {}
COINS = torch.Generator()


def accept_greedily(
    candidates: Tensor,
    packed: Tensor,
    predicted: Tensor,
    index: Tensor,
    count: Tensor,
    token: Tensor,
    valid: Tensor,
    steps: int,
) -> None:
    """Follow first child and siblings while a node holds what the target predicts at the node before."""
    assert {x.dtype for x in (candidates, packed, predicted, index, count, token)} == {torch.int32}
    assert valid.dtype == torch.bool
    for out in (index, count, token):
        out.zero_()
    links, drafted, best = packed.tolist(), candidates.tolist(), predicted.tolist()
    for row, has_tree in enumerate(valid.tolist()):
        node, path = 0, [0]
        while has_tree and len(path) < steps:
            child = links[row][node][1]
            while child >= 0 and drafted[row][child] != best[row][path[-1]]:
                child = links[row][child][2]
            if child < 0:
                break
            node = child
            path.append(links[row][child][0])
        index[row, : len(path)] = torch.tensor(path, dtype=torch.int32)
        token[row, : len(path)] = predicted[row, path]
        count[row] = len(path) - 1


def accept_by_rejection(
    drafts: Tensor,
    probs: Tensor,
    next_token: Tensor,
    next_sibling: Tensor,
    valid: Tensor,
    index: Tensor,
    count: Tensor,
    token: Tensor,
    steps: int,
    seed: Tensor,
    offset: Tensor,
) -> None:
    """One coin a level against the siblings' cumulative probability; if it passes them all, a sample without them."""
    assert drafts.dtype == index.dtype == count.dtype == token.dtype == torch.int64
    assert probs.dtype == torch.float32
    for out in (index, count, token):
        out.zero_()

    def sample(weights: Tensor) -> int:
        return int(torch.multinomial(weights, 1, generator=COINS))

    children, siblings = next_token.tolist(), next_sibling.tolist()
    for row, has_tree in enumerate(valid.tolist()):
        node, taken = 0, 0
        while True:
            child = children[row][node] if has_tree and taken < steps - 1 else -1
            coin, passed, tried = float(torch.rand((), generator=COINS)), 0.0, []
            while child >= 0:
                tried.append(int(drafts[row, child - 1]))
                passed += float(probs[row, node, tried[-1]])
                if coin <= passed:
                    break
                child = siblings[row][child]
            if child < 0:
                left = probs[row, node].clone()
                left[tried] = 0
                token[row, taken] = sample(left if left.sum() > 1e-10 else probs[row, node])
                break
            token[row, taken], node, taken = tried[-1], child, taken + 1
            index[row, taken] = child
        count[row] = taken


def compact(
    indices: Tensor,
    num_accepted: Tensor,
    past: Tensor,
    paged: bool,
    layers: int,
    heads: int,
    head_bytes: int,
    rewind: int,
    longest: int,
    pointers: Tensor,
    offsets: Tensor,
    blocks: int,
    tokens_per_block: int,
    stream: Tensor | None,
) -> None:
    """Move the K/V of accepted drafts to the places behind the root; all rows are read before any is written."""
    pool = POOLS[int(pointers.flatten()[0])]
    assert (layers, heads, tokens_per_block) == (pool.k.shape[0], pool.k.shape[3], pool.page_size)
    assert head_bytes == pool.k.shape[-1] * pool.k.element_size()
    for row in range(len(indices)):
        count = max(int(num_accepted[row]) - 1, 0)
        first = int(past[row]) - rewind
        source, to = first + indices[row, :count].long(), first + torch.arange(count)
        pages, inside = offsets[row, source // tokens_per_block], source % tokens_per_block
        k, v = pool.k[:, pages, inside].clone(), pool.v[:, pages, inside].clone()
        pages, inside = offsets[row, to // tokens_per_block], to % tokens_per_block
        pool.k[:, pages, inside], pool.v[:, pages, inside] = k, v


_TRTLLM.impl("verify_dynamic_tree_greedy_out_packed_op", accept_greedily, "CPU")
_TRTLLM.impl("verify_dynamic_tree_rejection_out_op", accept_by_rejection, "CPU")
_TENSORRT_LLM.impl("update_kv_cache_draft_token_location_2d", compact, "CPU")
