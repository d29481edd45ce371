"""Optimization profiles: the shapes that an engine is built for, from the recipe's limits and tree.

    target    decoding   B requests, as many rows as a tree may have
              prefill    one request, a chunk of rows
    drafters  drafting   B requests, K blocks, after at most as many new context tokens as a step commits
              injection  features of many tokens in one product, and one dummy row
              without features, γ rows for each of B requests

Classic TensorRT selects kernels at build time, so it gets one profile per power of two, for batches above the one
before.
TensorRT-RTX compiles kernels for the exact shapes at run time, and every profile costs: with five profiles instead of
one, a drafter of two layers and 17 MB gave an engine of 46 MB instead of 21, and SmolLM2's target took four times as
long to build. It gets one profile for all buckets. The runtime uses the first profile that a shape fits.
"""

from __future__ import annotations

from collections.abc import Sequence

from d2sd.manifest import Shapes
from d2sd.modeling.config import BodyConfig, DecoderConfig, DraftConfig, block_rows
from d2sd.plugins.cascade_attention.mask import WORD
from d2sd.recipe import Builder, Recipe
from d2sd.runtime.backends.exported import view_inputs
from d2sd.runtime.request import power_of_two, powers_of_two

#: Input -> its minimum, optimum and maximum shape.
Profile = dict[str, Shapes]
#: Minimum, optimum and maximum.
_Size = tuple[int, int, int]
#: Tokens whose K/V one injection computes: enough rows to fill a GPU.
MAX_INJECTED = 1024

# Shape letters: B requests, T rows, C new context rows, W words of the attention mask, M pages a request, P pages.


def make_profiles(recipe: Recipe, builder: Builder, config: DecoderConfig | DraftConfig) -> list[Profile]:
    """All profiles of one model of a recipe, in the order in which the runtime tries them."""
    tree, limits = recipe.tree, recipe.limits
    sizes = powers_of_two(limits.max_batch)
    between = [(1 + size // 2, size, size) for size in sizes]
    batches = [(1, sizes[-1], sizes[-1])] if builder == "tensorrt-rtx" else between
    rows = max(tree.row_budget, tree.block_size)
    if isinstance(config, DecoderConfig):
        decoding = [_rows(recipe, config.body, b, (1, rows, rows)) for b in batches]
        chunk = power_of_two(limits.prefill_chunk)
        return [*decoding, _rows(recipe, config.body, _just(1), (1, chunk, chunk))]
    if not config.target_layer_ids:
        return [_rows(recipe, config.body, b, _just(config.block_size)) for b in batches]
    drafted = tree.branches * block_rows(config, tree.block_size)
    width = len(config.target_layer_ids) * config.body.hidden_size
    drafting = [
        _rows(recipe, config.body, b, (1, drafted, drafted)) | _features(b, (1, tree.depth, tree.depth), width)
        for b in batches
    ]
    injection = _features(_just(1), (1, MAX_INJECTED, MAX_INJECTED), width)
    return [*drafting, _rows(recipe, config.body, _just(1), _just(1)) | injection]


def _rows(recipe: Recipe, body: BodyConfig, b: _Size, t: _Size) -> Profile:
    limits = recipe.limits
    # what the scheduler reserves for a request: its context, and the tokens that a step may add
    most = -(-(limits.max_context + recipe.tree.depth) // limits.page_size)
    m = (1, max(1, most // 2), power_of_two(most))
    p = (2, 1 + limits.max_batch * most, 1 + limits.max_batch * most)
    page = [p, _just(limits.page_size), _just(body.num_kv_heads), _just(body.head_dim)]
    views = view_inputs(body)
    w = (-(-t[0] // WORD), -(-t[1] // WORD), -(-t[2] // WORD))
    return {
        "embedded": _shapes([b, t, _just(body.hidden_size)]),
        "positions": _shapes([b, t]),
        **{view.mask: _shapes([b, t, w]) for view in views},
        **{view.first: _shapes([b, t]) for view in views if view.first},
        "page_table": _shapes([b, m]),
        "context_len": _shapes([b]),
        **{f"{kind}_pages_{layer}": _shapes(page) for kind in "kv" for layer in range(body.num_layers)},
    }


def _features(b: _Size, c: _Size, width: int) -> Profile:
    return {
        "features": _shapes([b, c, _just(width)]),
        "feature_positions": _shapes([b, c]),
        "feature_len": _shapes([b]),
    }


def _shapes(sizes: Sequence[_Size]) -> Shapes:
    low, opt, high = (list(shape) for shape in zip(*sizes, strict=True))
    return low, opt, high


def _just(size: int) -> _Size:
    return size, size, size
