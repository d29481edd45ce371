"""The attention nodes of exported graphs, and their definitions as functions of standard ONNX operators.

    TreeCascadeAttention   verification: rows over the committed context and each other
    BlockDraftAttention    drafting: the same, and over new context rows that are not in the pages yet
    TreeWindowAttention    the first of them where rows have a window or heads have sinks: two more inputs
    BlockWindowAttention   the second so

A graph carries the nodes *and* these functions. ONNX Runtime runs the functions, and so does TensorRT where the plugin
is not registered; where it is, `plugin_namespace` makes the parser use it. The semantics are those of `reference.py`,
with the mask packed: row t may attend to row u where bit u % 32 of `attn_mask[b, t, u // 32]` is set. `first` [B, T] is
the first position that a row sees of the context, new context rows included, and `sinks` [Hq] is -inf without one.
"""

# ONNX Script reads these functions' source; types would not be Python's. It may be missing where a user's type checker
# follows these sources, and where it is not, its own types refuse them.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, operator, import-not-found"
# mypy: disable-error-code="type-var, arg-type, assignment"

from __future__ import annotations

from functools import cache
from typing import Any

DOMAIN, VERSION = "d2sd", "1"
TREE, BLOCK = "TreeCascadeAttention", "BlockDraftAttention"
#: The nodes of layers with windows or sinks.
BEHIND = {TREE: "TreeWindowAttention", BLOCK: "BlockWindowAttention"}
_PAGES = ("k_pages", "v_pages", "page_table", "context_len", "attn_mask")
_BEHIND = ("first", "sinks")
#: Inputs by name, in the order of the nodes.
INPUTS = {TREE: ("q", "k", "v", *_PAGES), BLOCK: ("q", "k", "v", "new_k", "new_v", "new_len", *_PAGES)}
INPUTS |= {BEHIND[name]: (*inputs, *_BEHIND) for name, inputs in INPUTS.items()}
#: Opset of the graphs and of the functions; RMSNormalization is its newest operator.
OPSET = 23

# Shape letters: B requests, T new rows, C new context rows, W = ceil(T / 32) words, Hq/Hkv heads, D head size, P pages,
# Z tokens a page, M pages a request, S = M·Z context slots, G = Hq / Hkv.


def attributes() -> dict[str, str]:
    """Node attributes by which TensorRT's parser finds the plugin."""
    return {"plugin_namespace": DOMAIN, "plugin_version": VERSION}


@cache
def functions() -> tuple[Any, ...]:
    """`onnx.FunctionProto` of all nodes and of the functions they share. Needs onnxscript."""
    from onnxscript import opset23 as op
    from onnxscript import script
    from onnxscript.values import Opset

    ours = Opset(DOMAIN, 1)

    @script(ours, default_opset=op)
    def PagedContext(pages, page_table):
        # [P, Z, Hkv, D], [B, M] -> [B, S, Hkv, D] in fp32
        taken = op.Gather(pages, op.Cast(page_table, to=7), axis=0)
        return op.Cast(
            op.Reshape(taken, op.Concat(op.Shape(page_table, end=1), [-1], op.Shape(pages, start=2), axis=0)), to=1
        )

    @script(ours, default_opset=op)
    def Before(count, slots):
        # [B], [1] -> [B, slots] bool: the first `count` of each request
        return op.Less(op.Range(0, op.Squeeze(slots), 1), op.Unsqueeze(op.Cast(count, to=7), [1]))

    @script(ours, default_opset=op)
    def Unpacked(attn_mask, rows):
        # [B, T, W] int32, [1] -> [B, T, rows] bool
        words = op.Cast(attn_mask, to=7)
        words = op.Unsqueeze(op.Where(op.Less(words, 0), words + 4294967296, words), [3])
        powers = op.Cast(op.Pow(op.Constant(value_float=2.0), op.Cast(op.Range(0, 32, 1), to=1)), to=7)
        bits = op.Mod(op.Div(words, powers), 2)
        flat = op.Reshape(bits, op.Concat(op.Shape(attn_mask, end=2), [-1], axis=0))
        return op.Cast(op.Slice(flat, [0], rows, [2]), to=9)

    @script(ours, default_opset=op)
    def Scores(q, keys, seen):
        # q [B, T, Hq, D]; keys [B, N, Hkv, D] fp32; seen [B, T, N] -> [B, Hkv, G, T, N]
        size = op.Shape(q, start=3)
        heads = op.Concat(
            op.Shape(q, end=1), op.Shape(keys, start=2, end=3), [-1], op.Shape(q, start=1, end=2), size, axis=0
        )
        queries = op.Reshape(op.Transpose(op.Cast(q, to=1), perm=[0, 2, 1, 3]), heads)  # [B, Hkv, G, T, D]
        k = op.Unsqueeze(op.Transpose(keys, perm=[0, 2, 3, 1]), [2])  # [B, Hkv, 1, D, N]
        scores = op.MatMul(queries, k) / op.Sqrt(op.Cast(size, to=1))
        return op.Where(op.Unsqueeze(seen, [1, 2]), scores, op.Constant(value_float=-1e30))

    @script(ours, default_opset=op)
    def Weighed(q, weights, values):
        # weights [B, Hkv, G, T, N], values [B, N, Hkv, D] fp32 -> [B, T, Hq, D] in q's type
        v = op.Unsqueeze(op.Transpose(values, perm=[0, 2, 1, 3]), [2])  # [B, Hkv, 1, N, D]
        merged = op.Concat(op.Shape(q, end=1), [-1], op.Shape(q, start=1, end=2), op.Shape(q, start=3), axis=0)
        out = op.Reshape(op.MatMul(weights, v), merged)
        return op.CastLike(op.Transpose(out, perm=[0, 2, 1, 3]), q)

    @script(ours, default_opset=op)
    def Apart(keys, values):
        # Broken values move to their scores: where they are hidden, a weight of 0 times NaN would be NaN
        broken = op.Cast(op.Or(op.IsNaN(values), op.IsInf(values)), to=1)
        whole = op.Equal(op.ReduceMax(broken, [3], keepdims=1), op.Constant(value_float=0.0))
        broken_key = op.Constant(value_float=float("nan"))
        return op.Where(whole, keys, broken_key), op.Where(whole, values, op.Constant(value_float=0.0))

    @script(ours, default_opset=op)
    def Attend(q, keys, values, seen):
        whole_k, whole_v = Apart(keys, values)
        return Weighed(q, op.Softmax(Scores(q, whole_k, seen), axis=-1), whole_v)

    @script(ours, default_opset=op)
    def AttendWithSinks(q, keys, values, seen, sinks):
        # A sink is a last score of its head, whose weight is dropped
        whole_k, whole_v = Apart(keys, values)
        scores = Scores(q, whole_k, seen)
        of_head = op.Concat([1], op.Shape(scores, start=1, end=3), [1, 1], axis=0)
        of_row = op.Concat(op.Shape(scores, end=4), [1], axis=0)
        last = op.Expand(op.Reshape(op.Cast(sinks, to=1), of_head), of_row)
        weights = op.Softmax(op.Concat(scores, last, axis=-1), axis=-1)
        return Weighed(q, op.Slice(weights, [0], [-1], [4]), whole_v)

    @script(ours, default_opset=op)
    def Cascade(q, k, v, old_k, old_v, inside, attn_mask):
        # Every row attends to old_k, old_v [B, N, Hkv, D] fp32 where `inside` [B, N], and to k, v by `attn_mask`
        keys, values = op.Concat(old_k, op.Cast(k, to=1), axis=1), op.Concat(old_v, op.Cast(v, to=1), axis=1)
        everybody = op.Concat(op.Shape(q, end=2), op.Shape(old_k, start=1, end=2), axis=0)
        own = Unpacked(attn_mask, op.Shape(q, start=1, end=2))
        return Attend(q, keys, values, op.Concat(op.Expand(op.Unsqueeze(inside, [1]), everybody), own, axis=2))

    @script(ours, default_opset=op)
    def TreeCascadeAttention(
        q, k, v, k_pages, v_pages, page_table, context_len, attn_mask, plugin_namespace: str, plugin_version: str
    ):
        old_k = PagedContext(k_pages, page_table)
        inside = Before(context_len, op.Shape(old_k, start=1, end=2))
        return Cascade(q, k, v, old_k, PagedContext(v_pages, page_table), inside, attn_mask)

    @script(ours, default_opset=op)
    def BlockDraftAttention(
        q, k, v, new_k, new_v, new_len, k_pages, v_pages, page_table, context_len, attn_mask,
        plugin_namespace: str, plugin_version: str,
    ):  # fmt: skip
        old_k = PagedContext(k_pages, page_table)
        committed = Before(context_len, op.Shape(old_k, start=1, end=2))
        inside = op.Concat(committed, Before(new_len, op.Shape(new_k, start=1, end=2)), axis=1)  # [B, S + C]
        all_k = op.Concat(old_k, op.Cast(new_k, to=1), axis=1)
        all_v = op.Concat(PagedContext(v_pages, page_table), op.Cast(new_v, to=1), axis=1)
        return Cascade(q, k, v, all_k, all_v, inside, attn_mask)

    @script(ours, default_opset=op)
    def CascadeBehind(q, k, v, old_k, old_v, inside, places, attn_mask, first, sinks):
        # As Cascade, of keys at `places` [B, N] or [1, N] int64 those from `first` on
        bound = op.Cast(first, to=7)
        keys, values = op.Concat(old_k, op.Cast(k, to=1), axis=1), op.Concat(old_v, op.Cast(v, to=1), axis=1)
        near = op.GreaterOrEqual(op.Unsqueeze(places, [1]), op.Unsqueeze(bound, [2]))  # [B, T, N]
        own = Unpacked(attn_mask, op.Shape(q, start=1, end=2))
        seen = op.Concat(op.And(op.Unsqueeze(inside, [1]), near), own, axis=2)
        return AttendWithSinks(q, keys, values, seen, sinks)

    @script(ours, default_opset=op)
    def Places(slots):
        # [1] -> [1, slots] int64
        return op.Unsqueeze(op.Range(0, op.Squeeze(slots), 1), [0])

    @script(ours, default_opset=op)
    def TreeWindowAttention(
        q, k, v, k_pages, v_pages, page_table, context_len, attn_mask, first, sinks,
        plugin_namespace: str, plugin_version: str,
    ):  # fmt: skip
        old_k = PagedContext(k_pages, page_table)
        slots = op.Shape(old_k, start=1, end=2)
        inside, old_v = Before(context_len, slots), PagedContext(v_pages, page_table)
        return CascadeBehind(q, k, v, old_k, old_v, inside, Places(slots), attn_mask, first, sinks)

    @script(ours, default_opset=op)
    def BlockWindowAttention(
        q, k, v, new_k, new_v, new_len, k_pages, v_pages, page_table, context_len, attn_mask, first, sinks,
        plugin_namespace: str, plugin_version: str,
    ):  # fmt: skip
        old_k = PagedContext(k_pages, page_table)
        # not `slots` and `count`: TensorRT's parser confuses names here with those of the functions that are called
        old_size, new_size = op.Shape(old_k, start=1, end=2), op.Shape(new_k, start=1, end=2)
        inside = op.Concat(Before(context_len, old_size), Before(new_len, new_size), axis=1)  # [B, S + C]
        length = op.Unsqueeze(op.Cast(context_len, to=7), [1])
        old_places = op.Expand(Places(old_size), op.Concat(op.Shape(length, end=1), old_size, axis=0))
        places = op.Concat(old_places, length + Places(new_size), axis=1)
        all_k = op.Concat(old_k, op.Cast(new_k, to=1), axis=1)
        all_v = op.Concat(PagedContext(v_pages, page_table), op.Cast(new_v, to=1), axis=1)
        return CascadeBehind(q, k, v, all_k, all_v, inside, places, attn_mask, first, sinks)

    inputs = PagedContext, Before, Unpacked, Places
    sums = Scores, Weighed, Apart, Attend, AttendWithSinks, Cascade, CascadeBehind
    nodes = (TreeCascadeAttention, BlockDraftAttention, TreeWindowAttention, BlockWindowAttention)
    return tuple(function.to_function_proto() for function in (*inputs, *sums, *nodes))
