"""Exports model bodies with PyTorch's ONNX exporter: one `.onnx` per model, with its weights in `.onnx.data`.

All dimensions are symbolic except the geometry and the page size. The bytes depend only on the model and the tools'
versions.

A body is the part between the embedding and the head, with one attention node per layer. Embedding and head are not
exported: the models share them, and each engine would hold a copy. K/V pools are inputs, one per layer; K/V of the new
rows are outputs, which the runtime commits to the pools. Layers that see alike share a mask (`view_inputs`).

    target    embedded, positions, attn_mask, page_table, context_len, pages      -> hidden, features, k, v
    drafter   the same, and features, feature_positions, feature_len of context
              not yet written to the pages                                      -> hidden, k, v of that context
              one that reads the target's pages has no features                 -> hidden
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.export import Dim

from d2sd.errors import BuildError
from d2sd.extras import install_line
from d2sd.modeling.config import BodyConfig, DraftConfig
from d2sd.modeling.decoder import Decoder
from d2sd.modeling.drafters.dflash import Drafter
from d2sd.modeling.drafters.flexdraft import FlexHead
from d2sd.modeling.fp8 import Fp8Cache, Fp8Linear
from d2sd.modeling.layers import Layer
from d2sd.plugins.cascade_attention.onnx import BEHIND, BLOCK, DOMAIN, INPUTS, OPSET, TREE, attributes, functions
from d2sd.runtime.backends.exported import IOSpec, drafter_io_spec, target_io_spec, view_inputs

# Shape letters: B requests, T rows, C new context rows, W words of the attention mask, M pages a request, P pages,
# Z tokens a page, E hidden, n auxiliary layers, L layers, Hkv heads, D head size.

#: Positions of rows, masks of views, first positions of views with a window; page table and length of context.
Rows = tuple[Tensor, list[Tensor], list[Tensor], list[Tensor]]
#: K pages of each layer, and V pages.
Pages = list[list[Tensor]]


class TargetBody(nn.Module):
    """For export only: its attention returns zeros."""

    def __init__(self, target: Decoder, aux_layer_ids: tuple[int, ...]) -> None:
        super().__init__()
        self.layers, self.norm, self._angles = target.layers, target.norm, target.angles
        self._config, self._aux_layer_ids = target.config.body, aux_layer_ids

    def forward(self, embedded: Tensor, rows: Rows, pages: Pages) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """embedded [B, T, E] -> hidden [B, T, E], normalized; features [B, T, n·E]; k, v [L, B, T, Hkv, D]."""
        x, angles = embedded, self._angles(rows[0], embedded.dtype)
        keys, values, aux = [], [], {}
        attend = _Attention(self._config, rows, pages)
        for index, layer in enumerate(self.layers):
            x, (k, v) = layer(x, angles[index], index, attend)
            keys.append(k)
            values.append(v)
            if index in self._aux_layer_ids:
                aux[index] = x
        features = torch.cat([aux[i] for i in self._aux_layer_ids], dim=-1) if self._aux_layer_ids else x[..., :0]
        return self.norm(x), features, torch.stack(keys), torch.stack(values)


class DrafterBody(nn.Module):
    """For export only: its attention returns zeros."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__()
        self._drafter = drafter

    def forward(self, embedded: Tensor, rows: Rows, new: list[Tensor], pages: Pages) -> tuple[Tensor, Tensor, Tensor]:
        """embedded [B, T, E] and features [B, C, n·E] -> hidden [B, T, E]; k, v [L, B, C, Hkv, D] of the features.

        `new`: features of context, their positions, and how many there are.
        """
        features, feature_positions, feature_len = new
        new_k, new_v = self._drafter.context_keys_values(features, feature_positions)
        attend = _Attention(self._drafter.config.body, rows, pages, (new_k, new_v, feature_len))
        return self._drafter(embedded, rows[0], attend), new_k, new_v


class FlexBody(nn.Module):
    """For export only: its attention returns zeros. A graph shares no weights, so it has a copy of the target's MLPs
    and norms.
    """

    def __init__(self, head: FlexHead) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_FlexLayer(cast("Layer", layer)) for layer in head.layers)
        self.norm, self._rotary, self._config = head.norm, head.rotary, head.config.body

    def forward(self, embedded: Tensor, rows: Rows, pages: Pages) -> Tensor:
        """embedded [B, T, E], of `FlexHead.blocks` -> hidden [B, T, E], normalized."""
        x, cos_sin = embedded, self._rotary(rows[0], embedded.dtype)
        attend = _Attention(self._config, rows, pages)
        for index, layer in enumerate(self.layers):
            x, _ = layer(x, cos_sin, index, attend)
        out: Tensor = self.norm(x)
        return out


class _FlexLayer(Layer):
    """A `DraftLayer` that registers the modules it shares with the target."""

    def __init__(self, layer: Layer) -> None:
        nn.Module.__init__(self)
        self.self_attn, self.mlp = layer.self_attn, layer.mlp
        self.input_layernorm, self.post_attention_layernorm = layer.input_layernorm, layer.post_attention_layernorm


class _Attention:
    """The node of each layer."""

    def __init__(
        self, body: BodyConfig, rows: Rows, pages: Pages, new: tuple[Tensor, Tensor, Tensor] | None = None
    ) -> None:
        """`new`: K/V of new context rows [L, B, C, Hkv, D], and how many."""
        positions, masks, firsts, of_context = rows
        views = view_inputs(body)
        self._masks = dict(zip((view.mask for view in views), masks, strict=True))
        self._firsts = dict(zip((view.first for view in views if view.first), firsts, strict=True))
        self._views = [next(view for view in views if view.of == seen) for seen in body.views]
        self._positions, self._pages, self._of_context, self._new = positions, pages, of_context, new

    def __call__(self, index: int, q: Tensor, k: Tensor, v: Tensor, *, sinks: Tensor | None = None) -> Tensor:
        view, new = self._views[index], self._new
        name = TREE if new is None else BLOCK
        inputs = [q, k, v, *([] if new is None else [new[0][index], new[1][index], new[2]])]
        inputs += [*(pages[index] for pages in self._pages), *self._of_context, self._masks[view.mask]]
        if view.first is not None or sinks is not None:
            name = BEHIND[name]
            inputs.append(self._positions * 0 if view.first is None else self._firsts[view.first])
            inputs.append(torch.full((q.shape[2],), -torch.inf, dtype=q.dtype) if sinks is None else sinks)
        assert len(inputs) == len(INPUTS[name])
        return _node(name, inputs, q)


def _node(name: str, inputs: list[Tensor], like: Tensor) -> Tensor:
    out: Tensor = torch.onnx.ops.symbolic(
        f"{DOMAIN}::{name}", inputs, {**attributes()}, dtype=like.dtype, shape=like.shape, version=1
    )
    return out


class _QuantizedLinear(nn.Module):
    """An `Fp8Linear` as QuantizeLinear and DequantizeLinear around a MatMul, which TensorRT fuses."""

    def __init__(self, layer: Fp8Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self._weight = nn.Parameter(layer.weight.t().contiguous(), requires_grad=False)
        self._bias = layer.bias
        for name in ("weight_scale", "input_scale"):
            self.register_buffer(name, getattr(layer, name).to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        weight = _dequantized(self._weight, self.get_buffer("weight_scale"), x.dtype)
        out = torch.matmul(_rounded(x, self.get_buffer("input_scale")), weight)
        return out if self._bias is None else out + self._bias


class _QuantizedCache(nn.Module):
    """An `Fp8Cache` as QuantizeLinear and DequantizeLinear."""

    def __init__(self, cache: Fp8Cache, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("scale", cache.scale.to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        return _rounded(x, self.get_buffer("scale"))


def _rounded(x: Tensor, scale: Tensor) -> Tensor:
    fp8 = torch.onnx.ops.symbolic("QuantizeLinear", [x, scale, _zero()], dtype=torch.float8_e4m3fn, shape=x.shape)
    return _dequantized(fp8, scale, x.dtype)


def _dequantized(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    out: Tensor = torch.onnx.ops.symbolic("DequantizeLinear", [x, scale, _zero()], dtype=dtype, shape=x.shape)
    return out


def _zero() -> Tensor:
    """The zero point selects FP8: without one the output would be uint8."""
    return torch.zeros((), dtype=torch.float8_e4m3fn)


def lower_fp8_to_qdq(body: nn.Module, dtype: torch.dtype) -> None:
    """Replace every FP8 layer of a body, in place, by QuantizeLinear and DequantizeLinear."""
    replacements: dict[type[nn.Module], Any] = {Fp8Linear: _QuantizedLinear, Fp8Cache: _QuantizedCache}
    for parent in list(body.modules()):
        for name, child in list(parent.named_children()):
            if type(child) in replacements:
                setattr(parent, name, replacements[type(child)](child, dtype))


#: Packages whose versions determine the bytes of a graph and the result of its check.
TOOLS = ("onnx", "onnxscript", "onnxruntime")
_FEATURES = ("features", "feature_positions", "feature_len")
_B, _T, _W, _M, _P, _C = (
    Dim("B", min=1, max=4096),
    Dim("T", min=1, max=4096),
    Dim("W", min=1, max=128),
    Dim("M", min=1, max=1 << 20),
    Dim("P", min=2, max=1 << 24),
    Dim("C", min=1, max=4096),
)


def require_exporter() -> None:
    """Raise `BuildError` if a package that exports graphs, or runs them for the checks, is not installed."""
    if missing := [tool for tool in TOOLS if find_spec(tool) is None]:
        raise BuildError(
            "Packages that export and check graphs are not installed.",
            where="engines",
            found=f"no {', no '.join(missing)}",
            fix=install_line("engines"),
        )


def export_target(target: Decoder, aux_layer_ids: tuple[int, ...], page_size: int, file: Path) -> None:
    """Write the target's graph; `aux_layer_ids` are the layers that drafters read.

    Raises `BuildError` without the extra `engines`.
    """
    body, dtype = target.config.body, target.embed_tokens.weight.dtype
    inputs, shapes = _example_rows(body, dtype)
    pools, pool_shapes = _example_pools(body, page_size, dtype)
    graph, spec = TargetBody(target, aux_layer_ids), target_io_spec(body, dtype)
    _export(graph, [*inputs, pools], [*shapes, pool_shapes], _names(body), spec, file)


def export_drafter(graph: nn.Module, config: DraftConfig, dtype: torch.dtype, page_size: int, file: Path) -> None:
    """Write a drafter's graph, `DrafterKind.graph_body`. Raises `BuildError` without the extra."""
    body = config.body
    inputs, shapes = _example_rows(body, dtype)
    names: tuple[str, ...] = ()
    if config.target_layer_ids:
        width = len(config.target_layer_ids) * body.hidden_size
        inputs.append([torch.zeros(2, 4, width, dtype=dtype), _int(2, 4), _int(2)])
        shapes.append([{0: _B, 1: _C}, {0: _B, 1: _C}, {0: _B}])
        names = _FEATURES
    pools, pool_shapes = _example_pools(body, page_size, dtype)
    spec = drafter_io_spec(config, dtype)
    _export(graph, [*inputs, pools], [*shapes, pool_shapes], _names(body, names), spec, file)


def _example_rows(body: BodyConfig, dtype: torch.dtype) -> tuple[list[Any], list[Any]]:
    # all sizes differ: the exporter would unify dimensions of equal size
    views = view_inputs(body)
    masks = [_int(2, 5, 3) for _ in views]
    firsts = [_int(2, 5) for view in views if view.first]
    rows = _int(2, 5), masks, firsts, [_int(2, 6), _int(2)]
    of_rows, of_context = {0: _B, 1: _T}, [{0: _B, 1: _M}, {0: _B}]
    of_views = [{0: _B, 1: _T, 2: _W} for _ in masks], [of_rows for _ in firsts]
    return [torch.zeros(2, 5, body.hidden_size, dtype=dtype), rows], [of_rows, (of_rows, *of_views, of_context)]


def _example_pools(body: BodyConfig, page_size: int, dtype: torch.dtype) -> tuple[list[Any], list[Any]]:
    shape = 7, page_size, body.num_kv_heads, body.head_dim
    pools = [[torch.zeros(shape, dtype=dtype) for _ in range(body.num_layers)] for _ in "kv"]
    return pools, [[{0: _P}] * body.num_layers] * 2


def _int(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def _names(body: BodyConfig, more: Sequence[str] = ()) -> list[str]:
    views = view_inputs(body)
    masks, firsts = [view.mask for view in views], [view.first for view in views if view.first]
    pages = [f"{kind}_pages_{layer}" for kind in "kv" for layer in range(body.num_layers)]
    return ["embedded", "positions", *masks, *firsts, "page_table", "context_len", *more, *pages]


def _export(body: nn.Module, inputs: list[Any], shapes: list[Any], names: list[str], spec: IOSpec, file: Path) -> None:
    require_exporter()
    import onnx

    body = copy.deepcopy(body).eval().requires_grad_(False)
    lower_fp8_to_qdq(body, inputs[-1][0][0].dtype)  # of the pages
    with torch.inference_mode(), _quiet():
        program = torch.onnx.export(
            body,
            tuple(inputs),
            dynamo=True,
            opset_version=OPSET,
            dynamic_shapes=tuple(shapes),
            input_names=names,
            output_names=list(spec.outputs),
            verbose=False,
        )
    assert program is not None
    model: Any = program.model_proto
    model.functions.extend(functions())
    if all(opset.domain != DOMAIN for opset in model.opset_import):
        model.opset_import.append(onnx.helper.make_opsetid(DOMAIN, 1))
    strip_metadata(model)
    file.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, file, save_as_external_data=True, location=f"{file.name}.data", size_threshold=1024)


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the exporter's deprecation warnings, and its notice that torchvision is not installed."""
    logger = logging.getLogger("torch.onnx._internal.exporter._registration")
    before, logger.disabled = logger.disabled, True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.disabled = before


def strip_metadata(model: Any) -> None:
    """Remove metadata of the machine and of source lines; names of nodes stay."""
    model.ClearField("producer_version")
    graph = model.graph
    values = (*graph.value_info, *graph.input, *graph.output, *graph.initializer)
    for part in (model, graph, *graph.node, *values):
        part.ClearField("metadata_props")
        part.ClearField("doc_string")
