"""FlexDraft's mask rows against loops in float64 that share no line with them, and the target beside them.

Shape letters: B requests, G block size, C context tokens, E hidden, V vocabulary.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from d2sd.modeling import native
from d2sd.modeling.config import BodyConfig
from d2sd.modeling.decoder import Decoder, DecoderOutput
from d2sd.modeling.drafters.flexdraft import FlexHead
from d2sd.modeling.fp8 import kv_scales
from d2sd.modeling.kv_pool import KVPool, Rows
from d2sd.modeling.native import pack
from d2sd.modeling.where import Where
from d2sd.plugins.cpu import library
from tests.modeling.loops import Vector, Weights, attention, behind_attention, heads, of_layer, rms_norm
from tests.tiny import feed, in_fp8, pool_for, random_tokens, tiny_decoder, tiny_flex

GAMMA = 4


def pair(layers: int = 2, family: str = "qwen3", *, anchored: bool = False) -> tuple[Decoder, FlexHead]:
    target = tiny_decoder(family, layers=4, hidden=16, heads=4, kv_heads=2, head_dim=16)  # type: ignore[arg-type]
    return target, tiny_flex(target, layers=layers, block_size=GAMMA, anchored=anchored)


def drafted(target: Decoder, head: FlexHead, anchors: Tensor, rows: Rows, pool: KVPool) -> Tensor:
    """Hidden states [B, G, E] of the blocks behind `anchors [B]`; `pool` has the target's pages."""
    return head.draft(head.blocks(target.embed_tokens(anchors)), rows, pool.from_layer(head.config.split_layer))


def layer_of_loops(
    stream: list[Vector], given: tuple[list[Vector], list[Vector]], w: Weights, body: BodyConfig, *, causal: bool
) -> tuple[list[Vector], list[Vector], list[Vector]]:
    """Rows behind a context whose keys and values are `given` [token][K/V head]: outputs, and both with the rows'."""
    (keys, values), start, after = map(list, given), len(given[0]), []
    normed = [rms_norm(x, w["input_layernorm.weight"], body.rms_norm_eps) for x in stream]
    keys += [heads("k", x, start + place, w, body) for place, x in enumerate(normed)]
    values += [heads("v", x, start + place, w, body) for place, x in enumerate(normed)]
    for place, x in enumerate(normed):
        seen = start + place + 1 if causal else len(keys)
        attended = attention(heads("q", x, start + place, w, body), keys[:seen], values[:seen], w, body)
        after.append(behind_attention(stream[place] + attended, w, body))
    return after, keys, values


def reference(target: Decoder, head: FlexHead, tokens: list[int]) -> tuple[Vector, Vector]:
    """The block behind `tokens`, whose last is the anchor: hidden states [G, E] and calibrated logits [G-1, V]. The
    context's keys and values are computed by the same loops.
    """
    own = {name: x.double().numpy() for name, x in head.state_dict().items()}
    weights = {name: x.double().numpy() for name, x in target.state_dict().items()}
    body, split = target.config.body, head.config.split_layer
    block = [own["mask_embedding"]] * head.config.block_size
    if "anchor_projection.weight" in own:
        block[0] = own["anchor_projection.weight"] @ weights["embed_tokens.weight"][tokens[-1]]
    stream = [weights["embed_tokens.weight"][token] for token in tokens[:-1]]
    for layer in range(body.num_layers):
        theirs = of_layer(weights, layer)
        stream, *known = layer_of_loops(stream, ([], []), theirs, body, causal=True)
        if layer >= split:
            mixed = {**theirs, **of_layer(own, layer - split)}
            block, _, _ = layer_of_loops(block, (known[0], known[1]), mixed, body, causal=False)
    hidden = np.array([rms_norm(x, weights["norm.weight"], body.rms_norm_eps) for x in block])
    anchor = weights["embed_tokens.weight"][tokens[-1]]
    logits = []
    for h in hidden[1:]:
        inner = own["calibration.inner.weight"] @ np.concatenate([anchor, h]) + own["calibration.inner.bias"]
        added = own["calibration.outer.weight"] @ (inner / (1 + np.exp(-inner))) + own["calibration.outer.bias"]
        logits.append(weights["embed_tokens.weight"] @ h + added)
    return hidden, np.array(logits)


def prefilled(target: Decoder, tokens: Tensor, lengths: list[int]) -> tuple[KVPool, Rows]:
    """The leading tokens of each request in the target's pages, and a block of mask rows behind them."""
    pool, table = pool_for(target.config.body, len(tokens), tokens.shape[1])
    for row, length in enumerate(lengths):
        one = slice(row, row + 1)
        if length:
            feed(target, tokens[one, :length], pool, table[one], torch.tensor([0]))
    context = torch.tensor(lengths)
    everywhere = torch.ones(len(lengths), GAMMA, GAMMA, dtype=torch.bool)
    return pool, Rows(context[:, None] + torch.arange(GAMMA), everywhere, Where(table, context))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("family", "layers", "anchored"), [("qwen3", 2, False), ("qwen3", 3, True), ("llama", 1, False), ("llama", 2, True)]
)
def test_mask_rows_equal_the_reference(
    family: str, layers: int, anchored: bool, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contexts of several pages, of part of a page, and none."""
    target, head = pair(layers, family, anchored=anchored)
    lengths = [9, 3, 0]
    tokens = random_tokens(target, 3, 10)
    wanted = [reference(target, head, tokens[row, : n + 1].tolist()) for row, n in enumerate(lengths)]
    pool, rows = prefilled(target, tokens, lengths)
    anchors = tokens.gather(1, torch.tensor(lengths)[:, None])
    if not compiled:
        monkeypatch.setattr(library, "available", lambda: False)
    pack(target)
    pack(head, target)
    assert (head.compiled is not None) == (compiled and library.available())
    hidden = drafted(target, head, anchors[:, 0], rows, pool)
    logits = target.logits(hidden[:, 1:]) + head.calibrate(hidden[:, 1:], target.embed_tokens(anchors))
    for row, (states, expected) in enumerate(wanted):
        torch.testing.assert_close(hidden[row].double(), torch.from_numpy(states), rtol=0, atol=1e-4)
        torch.testing.assert_close(logits[row].double(), torch.from_numpy(expected), rtol=0, atol=1e-3)


#: How the layers run on a CPU: all at once, by operators with products that keep a row's bits, and by PyTorch's.
LAYERS = ("compiled", "packed", "plain")


def prepared_pair(kind: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Decoder, FlexHead]:
    target, head = pair()
    if kind != "compiled":
        patched = (native, "supported") if kind == "packed" else (library, "available")
        monkeypatch.setattr(*patched, lambda *_: False)
    pack(target)
    pack(head, target)
    assert (target.compiled is not None) == (head.compiled is not None) == (kind == "compiled" and library.available())
    return target, head


@pytest.mark.parametrize("needed", [None, (5, 3, 1)])
@pytest.mark.parametrize("kind", LAYERS)
def test_a_block_behind_a_node_is_the_one_drafted_after_it(
    kind: str, needed: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tree of two branches over contexts of three lengths: its own rows are those of a pass without mask rows, every
    block equals the block of sequential mode once the path to its node is committed, and the reference's. Bit by bit
    where the products are the library's.
    """
    lengths, parents = [9, 3, 0], [0, 0, 1, 0, 3]
    target, head = pair()
    tokens, nodes = random_tokens(target, 3, 16), random_tokens(target, 3, 5)
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        paths.append([*paths[parent], node] if node else [0])
    texts = [[tokens[row, :n].tolist() + nodes[row, path].tolist() for path in paths] for row, n in enumerate(lengths)]
    wanted = [[reference(target, head, [*text, 0])[0] for text in of_request] for of_request in texts]
    target, head = prepared_pair(kind, monkeypatch)
    exact = kind != "plain" and library.available()
    pool, rows = prefilled(target, tokens, lengths)
    mask = torch.tensor([[one in path for one in range(5)] for path in paths]).expand(3, -1, -1)
    depth = torch.tensor([len(path) - 1 for path in paths])
    context_len = rows.where.context_len
    tree = Rows(context_len[:, None] + depth, mask, Where(rows.where.pages, context_len), needed)
    out = target(nodes, replace(tree, joining=head.joining), pool)
    alone = target(nodes, tree, pool)
    kept = torch.arange(5) < torch.tensor(needed or (5, 5, 5))[:, None]

    def assert_same(one: Tensor, other: Tensor) -> None:
        torch.testing.assert_close(one, other, rtol=0, atol=0 if exact else 1e-5)

    assert_same(out.hidden[kept], alone.hidden[kept])
    for name in ("k", "v"):
        assert_same(getattr(out, name)[:, kept], getattr(alone, name)[:, kept])
    assert out.joined is not None
    assert alone.joined is None
    assert out.joined.shape == (3, 5, GAMMA, target.config.body.hidden_size)
    for node, path in enumerate(paths):
        at = context_len[:, None] + torch.arange(len(path))
        pool.write(out.k[:, :, path], out.v[:, :, path], (rows.where.pages,), at, kept[:, path])
        context = context_len + len(path)
        after = Rows(context[:, None] + torch.arange(GAMMA), rows.attn_mask, Where(rows.where.pages, context))
        hidden = drafted(target, head, nodes[:, 0], after, pool)  # which mask rows do not see
        for row in kept[:, node].nonzero().flatten().tolist():
            assert_same(out.joined[row, node], hidden[row])
            loops = torch.from_numpy(wanted[row][node])
            torch.testing.assert_close(out.joined[row, node].double(), loops, rtol=0, atol=1e-4)


@pytest.mark.skipif(not library.available(), reason="layers of one kind")
def test_rows_join_where_both_are_compiled_or_neither() -> None:
    target, head = pair()
    assert head.joins(target)
    pack(target)
    assert not head.joins(target)
    pack(head, target)
    assert head.joins(target)


def test_the_target_is_the_same_to_the_bit() -> None:
    """Plain and compiled, with a head that has joined and drafted between the target's passes."""

    def run(*, with_head: bool) -> list[DecoderOutput]:
        target, head = pair(anchored=True)
        tokens = random_tokens(target, 2, 12)
        pool, rows = prefilled(target, tokens, [8, 5])
        pack(target)
        if with_head:
            pack(head, target)
            drafted(target, head, tokens[:, 8], rows, pool)
        found = []
        for _ in range(2):
            found.append(target(tokens[:, 8:], rows, pool, (1,)))
            if with_head:
                drafted(target, head, tokens[:, 9], rows, pool)
        return found

    for alone, beside in zip(run(with_head=False), run(with_head=True), strict=True):
        for name in ("hidden", "features", "k", "v"):
            assert torch.equal(getattr(alone, name), getattr(beside, name)), name


def test_the_rest_is_the_targets() -> None:
    """A head holds what it adds; norms and MLPs are the target's modules, in its copies as well."""
    target, head = pair(anchored=True)
    added = [f"self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
    attention = {f"layers.{layer}.{name}.weight" for layer in range(2) for name in added}
    network = {f"calibration.{layer}.{name}" for layer in ("inner", "outer") for name in ("weight", "bias")}
    assert head.state_dict().keys() == attention | network | {"mask_embedding", "anchor_projection.weight"}
    twin, its_head = deepcopy((target, head))
    assert its_head.layers[0].mlp is twin.layers[2].mlp
    assert its_head.layers[0].mlp is not target.layers[2].mlp
    assert its_head.norm is twin.norm


def test_a_draft_vocabulary_is_a_part_of_the_whole() -> None:
    target, head = pair()
    ids = (0, 3, 9, 41, 62)
    small = tiny_flex(target, layers=2, block_size=GAMMA, draft_vocabulary=ids)
    whole = head.state_dict()
    for name in ("calibration.outer.weight", "calibration.outer.bias"):
        whole[name] = whole[name][list(ids)]
    small.load_state_dict(whole)
    hidden, anchor = torch.randn(2, 3, 16), torch.randn(2, 1, 16)
    torch.testing.assert_close(small.calibrate(hidden, anchor), head.calibrate(hidden, anchor)[..., list(ids)])
    assert small.draft_ids is not None
    assert small.draft_ids.tolist() == list(ids)


def test_gradients_reach_what_is_added_and_nothing_else() -> None:
    target, head = pair(anchored=True)
    head.requires_grad_(True)
    positions = torch.arange(GAMMA)[None]

    def attend(index: int, q: Tensor, k: Tensor, v: Tensor, *, sinks: Tensor | None = None) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)

    anchor = target.embed_tokens.weight[7]
    hidden = head(head.blocks(anchor[None]), positions, attend)
    logits = target.logits(hidden) + head.calibrate(hidden, anchor)
    logits[..., 3].sum().backward()  # type: ignore[no-untyped-call]
    assert all(p.grad is not None and p.grad.any() for p in head.parameters())
    assert all(p.grad is None for p in target.parameters())


def test_an_fp8_target_lends_its_layers_and_pages() -> None:
    """MLPs in FP8, and K/V pages with a scale a layer, which hold what wider pages of the same numbers hold."""
    target, head = pair()
    tokens = random_tokens(target, 2, 10)
    linears = [f"layers.{layer}.mlp.{part}_proj" for layer in range(4) for part in ("gate", "up", "down")]
    narrow = in_fp8(target, linears, cache=True)
    found = []
    for model, fp8 in ((target, None), (narrow, None), (narrow, kv_scales(narrow))):
        head.join(model)
        pool, table = pool_for(model.config.body, 2, 10, fp8=fp8)
        feed(model, tokens[:, :9], pool, table, torch.tensor([0, 0]))
        context = torch.tensor([9, 9])
        everywhere = torch.ones(2, GAMMA, GAMMA, dtype=torch.bool)
        rows = Rows(context[:, None] + torch.arange(GAMMA), everywhere, Where(table, context))
        found.append(drafted(model, head, tokens[:, 9], rows, pool))
    plain, wide, paged = found
    torch.testing.assert_close(wide, paged, atol=1e-5, rtol=0)
    assert (plain - wide).abs().max() > 0.01
