"""Models whose bodies are exported graphs; `ModelRunner` runs them like PyTorch modules, over the same K/V pools.

A session runs a graph with named input and output tensors: `OnnxSession` on a CPU, `EngineSession` with TensorRT.
Embedding and head stay in PyTorch, because the models share them, and so does what a kind of drafter adds to them.
"""

# ONNX Runtime has no types, and may be missing where a user's type checker follows these sources.
# mypy: disable-error-code="import-untyped,import-not-found"

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from d2sd.errors import BundleError
from d2sd.extras import install_line
from d2sd.modeling.config import BodyConfig, DraftConfig
from d2sd.modeling.decoder import DecoderOutput, TargetModel
from d2sd.modeling.drafters.dflash import DFlashModel
from d2sd.modeling.drafters.interface import DraftModel
from d2sd.modeling.inference import InferenceLayers
from d2sd.modeling.kv_pool import Chunks, KVPool, PoolSizes, Rows, windowed
from d2sd.modeling.layers import Rotary
from d2sd.modeling.where import Where
from d2sd.plugins.cascade_attention import AttnMask, pack_mask_bits
from d2sd.runtime.request import floor_power_of_two, power_of_two

# Shape letters: B requests, T rows, C new context rows, E hidden, n auxiliary layers, L layers, Hkv heads, D head size.

#: Largest C that graphs are exported for.
CONTEXT_ROWS = 4096
#: Fewest pages that graphs are exported for.
_FEWEST_PAGES = 2


@dataclass(frozen=True, slots=True)
class IOSpec:
    """Inputs and outputs of a graph: name -> type."""

    inputs: Mapping[str, torch.dtype]
    outputs: Mapping[str, torch.dtype]


def target_io_spec(body: BodyConfig, dtype: torch.dtype) -> IOSpec:
    """Inputs and outputs of a target with weights and pages in `dtype`."""
    return IOSpec(_of_rows(body, dtype), dict.fromkeys(("hidden", "features", "k", "v"), dtype))


def drafter_io_spec(config: DraftConfig, dtype: torch.dtype) -> IOSpec:
    """Inputs and outputs of a drafter with weights and pages in `dtype`; the pages are the target's if it has none."""
    rows = _of_rows(config.body, dtype)
    if not config.target_layer_ids:
        return IOSpec(rows, {"hidden": dtype})
    of_features = {"features": dtype, "feature_positions": torch.int32, "feature_len": torch.int32}
    return IOSpec(rows | of_features, dict.fromkeys(("hidden", "k", "v"), dtype))


def _of_rows(body: BodyConfig, dtype: torch.dtype) -> dict[str, torch.dtype]:
    views = view_inputs(body)
    of_views = *(view.mask for view in views), *(view.first for view in views if view.first)
    integers = dict.fromkeys(("positions", *of_views, "page_table", "context_len"), torch.int32)
    pages = dict.fromkeys((f"{kind}_pages_{layer}" for kind in "kv" for layer in range(body.num_layers)), dtype)
    return {"embedded": dtype} | integers | pages


class ViewInputs(NamedTuple):
    """Names of the inputs that say what rows see in the layers that see alike."""

    of: tuple[int | None, bool]  # window and causality, as in `BodyConfig.views`
    mask: str
    first: str | None  # with a window


def view_inputs(body: BodyConfig) -> list[ViewInputs]:
    """The views of a body's layers, in the order of their first layer."""
    found = []
    for number, view in enumerate(dict.fromkeys(body.views)):
        suffix = f"_{number}" if number else ""
        found.append(ViewInputs(view, f"attn_mask{suffix}", f"first{suffix}" if view[0] is not None else None))
    return found


class Session(Protocol):
    """A graph that is ready to run."""

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All outputs by name. Inputs are contiguous, of the types of the graph's `IOSpec`."""


class OnnxSession:
    """ONNX Runtime on the CPU: attention runs as the ONNX functions stored in the graph."""

    def __init__(self, file: Path) -> None:
        """Raises `BundleError` if ONNX Runtime is not installed or cannot load the file."""
        try:
            import onnxruntime
        except ModuleNotFoundError:
            raise BundleError("ONNX Runtime is not installed.", where=file, fix=install_line("engines")) from None
        options = onnxruntime.SessionOptions()
        options.add_session_config_entry("session.disable_quant_qdq", "1")  # ORT has no FP8 kernels on CPU
        try:
            self._session: Any = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # ONNX Runtime's exception classes are not public
            raise BundleError("ONNX Runtime cannot load the graph.", where=file, found=error) from None
        self._outputs = [output.name for output in self._session.get_outputs()]

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        out = self._session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})
        return {name: torch.from_numpy(array) for name, array in zip(self._outputs, out, strict=True)}


class GraphDecoder(TargetModel):
    """A target: embedding and head of `tables`, and a graph between them that outputs features of `aux_layer_ids`."""

    one_page_table = True

    def __init__(
        self,
        tables: TargetModel,
        aux_layer_ids: tuple[int, ...],
        session: Session,
        max_requests: Callable[[int], int] = lambda rows: sys.maxsize,
    ) -> None:
        """`max_requests(rows)` is the most requests that the session accepts in one run of `rows` rows each."""
        super().__init__()
        self.config, self.packed_head = tables.config, tables.packed_head
        self.embed_tokens = tables.embed_tokens
        if not tables.config.tie_word_embeddings:
            self.lm_head = tables.lm_head
        self._aux_layer_ids, self._session, self._max_requests = aux_layer_ids, session, max_requests

    def forward(
        self, tokens: Tensor, rows: Rows | Chunks, pool: KVPool, aux_layer_ids: tuple[int, ...] = ()
    ) -> DecoderOutput:
        assert aux_layer_ids in ((), self._aux_layer_ids), "a graph's features are fixed"
        return self._chunks(tokens, rows, pool) if isinstance(rows, Chunks) else self._run(tokens, rows, pool)

    def _run(self, tokens: Tensor, rows: Rows, pool: KVPool) -> DecoderOutput:
        out = self._session.run(_of_pass(self.config.body, self.embed_tokens(tokens), rows, pool))
        return DecoderOutput(out["hidden"], out["features"], out["k"], out["v"])

    def _chunks(self, tokens: Tensor, chunks: Chunks, pool: KVPool) -> DecoderOutput:
        """A graph has as many rows of every request: chunks of one length bucket share a run, padded to it."""
        groups: dict[int, list[int]] = {}
        lengths, spans = chunks.attn_mask.lengths, chunks.attn_mask.spans()
        for request, length in enumerate(lengths):
            groups.setdefault(power_of_two(length), []).append(request)
        parts: dict[int, tuple[DecoderOutput, int]] = {}
        given = pool.page_table(chunks)
        for count, members in groups.items():
            most = floor_power_of_two(self._max_requests(count))
            for some in (members[first : first + most] for first in range(0, len(members), most)):
                batch_tokens = tokens.new_zeros(power_of_two(len(some)), count)
                table = given.new_zeros(len(batch_tokens), given.shape[1])
                context = chunks.where.context_len.new_zeros(len(batch_tokens))
                for row, request in enumerate(some):  # a list as an index would be a copy that waits
                    table[row], context[row] = given[request], chunks.where.context_len[request]
                    batch_tokens[row, : lengths[request]] = tokens[0, spans[request]]
                rows = Rows.chain(count, Where(table, context, table))
                out = self._run(batch_tokens, rows, pool)
                parts |= {request: (out, row) for row, request in enumerate(some)}
        places = [(*parts[request], length) for request, length in enumerate(lengths)]
        hidden, features = (
            torch.cat([getattr(out, name)[row, :length] for out, row, length in places])[None]
            for name in ("hidden", "features")
        )
        k, v = (
            torch.cat([getattr(out, name)[:, row, :length] for out, row, length in places], 1)[:, None] for name in "kv"
        )
        return DecoderOutput(hidden, features, k, v)


class GraphDrafter(DFlashModel):
    """A drafter of the geometry of `config`, run by a graph.

    A plugin appends the K/V of real features to the context's pages before the block attends to them. Without real
    features (length 0) it writes to the scratch page 0 at most.
    """

    one_page_table = True

    def __init__(
        self, drafter: DFlashModel, session: Session, page_size: int, context_rows: int = CONTEXT_ROWS
    ) -> None:
        """`context_rows` is the largest C that the session accepts for one request."""
        super().__init__()
        self.config, self._session = drafter.config, session
        self.register_buffer("draft_ids", drafter.draft_ids, persistent=False)
        self.add_module("outside", drafter.head)  # what the graph does not have
        self.register_parameter("mask_embedding", drafter.mask_embedding)
        self.pool = drafter.pool
        self._width = len(drafter.config.target_layer_ids) * drafter.config.body.hidden_size
        self._page_size, self._context_rows = page_size, context_rows
        self._scratch_pool: KVPool | None = None

    def draft(self, x: Tensor, rows: Rows, pool: KVPool) -> Tensor:
        batch, device = len(x), x.device
        nothing = x.new_zeros(batch, 1, self._width), _zeros(device, batch, 1), _zeros(device, batch)
        return self.draft_with_new_context(x, rows, pool, *nothing)

    def draft_with_new_context(
        self, embedded: Tensor, rows: Rows, pool: KVPool, features: Tensor, positions: Tensor, length: Tensor
    ) -> Tensor:
        """See `draft`; takes more context after the rows' own whose K/V is not in the pages yet.

        Of its features [B, C, n·E] at `positions` [B, C] the first `length` [B] of each request are real. The page
        table covers their positions, and a plugin writes their K/V there, as a commit would.
        """
        after = replace(rows, where=rows.where.after(length))
        inputs = _of_pass(self.config.body, embedded, rows, pool, after) | _features(features, positions, length)
        return self._session.run(inputs)["hidden"]

    def context_keys_values(self, features: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """See `DraftModel.context_keys_values`. The graph also drafts one masked row, whose output is discarded."""
        count, most = features.shape[1], self._context_rows
        if count <= most:
            return self._keys_values(features, positions)
        # copied: a slice may start at an address that is not aligned as TensorRT requires
        parts = [
            self._keys_values(features[:, at : at + most].clone(), positions[:, at : at + most])
            for at in range(0, count, most)
        ]
        return torch.cat([k for k, _ in parts], 2), torch.cat([v for _, v in parts], 2)

    def _keys_values(self, features: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        batch, device, body = len(features), features.device, self.config.body
        if self._scratch_pool is None:
            self._scratch_pool = KVPool(body, PoolSizes(_FEWEST_PAGES, self._page_size), features.dtype, str(device))
        # This cannot write to a page in use: no feature is real, the page table contains page 0 only, and the pool is
        # a scratch pool.
        rows = Rows.chain(1, Where(_zeros(device, batch, 1), _zeros(device, batch)))
        embedded = features.new_zeros(batch, 1, body.hidden_size)
        new = _features(features, positions, _zeros(device, batch))
        out = self._session.run(_of_pass(body, embedded, rows, self._scratch_pool) | new)
        return out["k"], out["v"]


class GraphLayers(InferenceLayers):
    """The layers of a drafter that reads the target's pages, in place of its compiled ones."""

    one_page_table = True

    def __init__(self, body: BodyConfig, session: Session) -> None:
        super().__init__()
        self._body, self._session = body, session

    def forward(
        self, x: Tensor, rotary: Rotary, rows: Rows | Chunks, pool: KVPool, aux_layer_ids: tuple[int, ...] = ()
    ) -> tuple[Tensor]:
        """x [B, T, E] -> hidden states [B, T, E]."""
        assert isinstance(rows, Rows)
        return (self._session.run(_of_pass(self._body, x, rows, pool))["hidden"],)


def graph_drafter(
    drafter: DraftModel, session: Session, page_size: int, context_rows: int = CONTEXT_ROWS
) -> DraftModel:
    """The drafter with a graph in place of its layers; all else, such as a calibration network, is `drafter`'s."""
    if isinstance(drafter, DFlashModel):
        return GraphDrafter(drafter, session, page_size, context_rows)
    clone = copy.copy(drafter)
    clone._modules = clone._modules.copy()  # the other's stay as they are
    clone.register_module("layers", nn.ModuleList())
    clone.register_module("compiled", GraphLayers(drafter.config.body, session))
    return clone


def _zeros(device: torch.device, *shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32, device=device)


def _int32(x: Tensor) -> Tensor:
    return x.int().contiguous()


def _features(features: Tensor, positions: Tensor, length: Tensor) -> dict[str, Tensor]:
    return {"features": features.contiguous(), "feature_positions": _int32(positions), "feature_len": _int32(length)}


def _of_pass(
    body: BodyConfig, embedded: Tensor, rows: Rows, pool: KVPool, after: Rows | None = None
) -> dict[str, Tensor]:
    """Inputs of a pass. `after` are its rows behind all their context, where some is not in the pages yet."""
    pages = {
        f"{kind}_pages_{i}": layer for kind, pages in (("k", pool.k), ("v", pool.v)) for i, layer in enumerate(pages)
    }
    views: dict[str, Tensor] = {}
    for view in view_inputs(body):
        mask = windowed(after or rows, *view.of)
        assert isinstance(mask, AttnMask)
        views[view.mask] = pack_mask_bits(mask.allowed)
        if view.first is not None and mask.first is not None:
            views[view.first] = _int32(mask.first)
    return {
        "embedded": embedded.contiguous(),
        "positions": _int32(rows.positions),
        **views,
        "page_table": _int32(pool.page_table(rows)),
        "context_len": _int32(rows.where.context_len),
        **pages,
    }
