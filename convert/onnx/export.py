"""Exports model bodies with PyTorch's ONNX exporter: one `.onnx` per model, with its weights in `.onnx.data`.

All dimensions are symbolic except the geometry and the page size. The bytes depend only on the model and the tools'
versions.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

from d2sd.convert.onnx.bodies import TargetBody, lower_fp8_to_qdq
from d2sd.errors import BuildError
from d2sd.extras import install_line
from d2sd.modeling.config import BodyConfig, DraftConfig
from d2sd.modeling.decoder import Decoder
from d2sd.plugins.cascade_attention.onnx import DOMAIN, OPSET, functions
from d2sd.runtime.backends.exported import IOSpec, drafter_io_spec, target_io_spec, view_inputs

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
