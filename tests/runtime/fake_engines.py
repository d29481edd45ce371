"""Fake engines of real models: what the graphs compute, and what the plugins leave in the pages."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import torch
from torch import Tensor, nn

from d2sd.convert.engines.profiles import make_profiles
from d2sd.modeling.config import BodyConfig
from d2sd.modeling.decoder import Decoder
from d2sd.modeling.drafters.dflash import Drafter
from d2sd.modeling.drafters.flexdraft import FlexHead
from d2sd.modeling.kv_pool import Chunks, KVPool, Rows
from d2sd.modeling.where import Where
from d2sd.plugins.cascade_attention import PagedContext, counters
from d2sd.plugins.cascade_attention.mask import WORD
from d2sd.plugins.cascade_attention.onnx import VERSION
from d2sd.plugins.kv_pages import write_pages
from d2sd.recipe import Recipe
from d2sd.runtime.backends.exported import drafter_io_spec, target_io_spec
from d2sd.runtime.backends.tensorrt_checks import EngineFile
from d2sd.tensorrt_env import TensorRT
from tests.runtime import fake_tensorrt
from tests.runtime.fake_tensorrt import GRAPHS, Dims, _Graph
from tests.runtime.helpers import BLOCK, BRANCHES, BUDGET

PAGE = 4
TRT = TensorRT("tensorrt-rtx", fake_tensorrt, "1.7.1.116")
RECIPE = Recipe.model_validate(
    {
        "d2sd": 1,
        "name": "tiny",
        "target": {"path": "target"},
        "drafters": {"first": {"path": "first"}, "second": {"path": "second"}},
        "tree": {"block_size": BLOCK, "branches": BRANCHES, "row_budget": BUDGET},
        "sampling": {"max_new_tokens": 32},
        "limits": {"max_batch": 4, "max_context": 64, "page_size": PAGE, "prefill_chunk": 8},
    }
)


def target_engine(folder: Path, target: Decoder, aux_layer_ids: tuple[int, ...], compute: str = "sm89") -> EngineFile:
    """An engine of the target in `folder`."""
    body, hidden = target.config.body, target.config.body.hidden_size
    model = deepcopy(target)
    setattr(model, "embed_tokens", nn.Identity())  # noqa: B010  # what comes in is embedded

    def run(given: dict[str, Tensor]) -> dict[str, Tensor]:
        out = model(given["embedded"], _rows(given), _Pages(given, body), aux_layer_ids)
        return {"hidden": out.hidden, "features": out.features, "k": out.k, "v": out.v}

    surface = target_io_spec(body, target.embed_tokens.weight.dtype)
    outputs: dict[str, Dims] = {"hidden": ("B", "T", hidden), "features": ("B", "T", len(aux_layer_ids) * hidden)}
    outputs |= dict.fromkeys(("k", "v"), (body.num_layers, "B", "T", body.num_kv_heads, body.head_dim))
    profiles = make_profiles(RECIPE, "tensorrt", target.config)  # a profile a power of two
    types = {**surface.inputs, **surface.outputs}
    return _engine(folder, "target", _Graph(_row_inputs(body), outputs, types, profiles, run), compute)


def drafter_engine(folder: Path, name: str, drafter: Drafter) -> EngineFile:
    """An engine of a drafter; its plugin writes new K/V to the pages that it is given, as `enqueue.py` does."""
    body, hidden = drafter.config.body, drafter.config.body.hidden_size
    model, width = deepcopy(drafter), len(drafter.config.target_layer_ids) * hidden

    def run(given: dict[str, Tensor]) -> dict[str, Tensor]:
        k, v = model.context_keys_values(given["features"], given["feature_positions"].long())
        pages, rows, new = _Pages(given, body), _rows(given), given["feature_len"].long()
        steps = torch.arange(k.shape[2])
        for layer, (keys, values) in enumerate(zip(pages.layers_k, pages.layers_v, strict=True)):
            places, keep = rows.where.context_len[:, None] + steps, steps < new[:, None]
            write_pages(k[layer][None], v[layer][None], keys[None], values[None], rows.where.pages, places, keep)
        after = Rows(rows.positions, rows.attn_mask, Where(rows.where.pages, rows.where.context_len + new))
        return {"hidden": model.draft(given["embedded"], after, pages), "k": k, "v": v}

    features: dict[str, Dims] = {"features": ("B", "C", width), "feature_positions": ("B", "C"), "feature_len": ("B",)}
    outputs: dict[str, Dims] = {"hidden": ("B", "T", hidden)}
    outputs |= dict.fromkeys(("k", "v"), (body.num_layers, "B", "C", body.num_kv_heads, body.head_dim))
    surface = drafter_io_spec(drafter.config, drafter.fc.weight.dtype)
    types = {**surface.inputs, **surface.outputs}
    profiles = make_profiles(RECIPE, "tensorrt", drafter.config)
    return _engine(folder, name, _Graph(_row_inputs(body) | features, outputs, types, profiles, run), "sm89")


def flex_engine(folder: Path, head: FlexHead) -> EngineFile:
    """An engine of a FlexDraft head that has joined its target."""
    body, model = head.config.body, deepcopy(head)

    def run(given: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"hidden": model.draft(given["embedded"], _rows(given), _Pages(given, body))}

    surface, outputs = drafter_io_spec(head.config, head.mask_embedding.dtype), {"hidden": ("B", "T", body.hidden_size)}
    types, profiles = {**surface.inputs, **surface.outputs}, make_profiles(RECIPE, "tensorrt", head.config)
    return _engine(folder, "flex", _Graph(_row_inputs(body), outputs, types, profiles, run), "sm89")  # type: ignore[arg-type]


def _engine(folder: Path, name: str, graph: _Graph, compute: str) -> EngineFile:
    GRAPHS[name] = graph
    path = folder / f"{name}.engine"
    path.write_text(name, "utf-8")
    return EngineFile(path, TRT.name, TRT.version, VERSION, compute, graph.profiles)


def _row_inputs(body: BodyConfig) -> dict[str, Dims]:
    pages: Dims = ("P", PAGE, body.num_kv_heads, body.head_dim)
    return {
        "embedded": ("B", "T", body.hidden_size),
        "positions": ("B", "T"),
        "attn_mask": ("B", "T", "W"),
        "page_table": ("B", "M"),
        "context_len": ("B",),
        **{f"{kind}_pages_{layer}": pages for kind in "kv" for layer in range(body.num_layers)},
    }


def _rows(given: dict[str, Tensor]) -> Rows:
    count = given["positions"].shape[1]
    bits = (given["attn_mask"][..., None] >> torch.arange(WORD, dtype=torch.int32)) & 1
    attn_mask = bits.flatten(2)[..., :count].bool()
    return Rows(given["positions"].long(), attn_mask, Where(given["page_table"].long(), given["context_len"].long()))


class _Pages(KVPool):
    """Pools whose layers lie wherever they were bound."""

    def __init__(self, given: dict[str, Tensor], body: BodyConfig) -> None:
        self.layers_k, self.layers_v = (
            [given[f"{kind}_pages_{layer}"] for layer in range(body.num_layers)] for kind in "kv"
        )
        self._views = body.views
        self.counters = counters(self.layers_k[0].device)
        self.states = None

    def context(self, index: int, rows: Rows | Chunks) -> PagedContext:
        return PagedContext(self.layers_k[index], self.layers_v[index], rows.where.pages, rows.where.context_len)
