"""Models whose bodies are graphs: the engine's executors run them like modules, over the same pools.

A session takes and gives tensors by name: ONNX Runtime on a CPU (`OnnxSession`), or an engine. Embedding and head stay
PyTorch's, because three models share them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from d2sd.errors import BundleError
from d2sd.modeling.decoder import Decoder, DecoderOutput
from d2sd.modeling.drafter import Drafter
from d2sd.modeling.rows import KVPool, Rows
from d2sd.plugins.cascade_attention.visible import pack_visible

# Shape letters: B requests, T rows, C new context rows, E hidden, n tapped layers, L layers, Hkv heads, D head size.


class Session(Protocol):
    """A graph that is ready to run."""

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All outputs by name."""


class OnnxSession:
    """ONNX Runtime on the CPU: attention runs as the functions that the graph carries."""

    def __init__(self, file: Path) -> None:
        """Raises `BundleError` where ONNX Runtime is not installed or does not take the file."""
        try:
            import onnxruntime
        except ModuleNotFoundError:
            raise BundleError("ONNX Runtime is not installed.", where=file, fix="pip install 'd2sd[engines]'") from None
        options = onnxruntime.SessionOptions()
        options.add_session_config_entry("session.disable_quant_qdq", "1")  # it would look for FP8 products it has not
        try:
            self._session: Any = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # its own classes, none public
            raise BundleError("ONNX Runtime does not take the graph.", where=file, found=error) from None
        self._outputs = [output.name for output in self._session.get_outputs()]

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        out = self._session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})
        return {name: torch.from_numpy(array) for name, array in zip(self._outputs, out, strict=True)}


class GraphDecoder(Decoder):
    """A target: embedding and head of `tables`, and a graph between them that reads the features of `taps`."""

    def __init__(self, tables: Decoder, taps: tuple[int, ...], session: Session) -> None:
        nn.Module.__init__(self)
        self.config, self.packed_head = tables.config, tables.packed_head
        self.embed_tokens = tables.embed_tokens
        if not tables.config.tie_word_embeddings:
            self.lm_head = tables.lm_head
        self._taps, self._session = taps, session

    def forward(self, tokens: Tensor, rows: Rows, pool: KVPool, taps: tuple[int, ...] = ()) -> DecoderOutput:
        assert taps in ((), self._taps), "a graph's features are fixed"
        out = self._session.run(_inputs(self.embed_tokens(tokens), rows, pool))
        return DecoderOutput(out["hidden"], out["features"], out["k"], out["v"])


class GraphDrafter(Drafter):
    """A drafter of the geometry of `config`, run by a graph."""

    def __init__(self, drafter: Drafter, session: Session, page_size: int) -> None:
        nn.Module.__init__(self)
        self.config, self._session = drafter.config, session
        self.register_buffer("draft_ids", drafter.draft_ids, persistent=False)
        self._width = len(drafter.config.target_layer_ids) * drafter.config.body.hidden_size
        self._dtype, self._page_size = drafter.fc.weight.dtype, page_size

    def draft(self, embedded: Tensor, rows: Rows, pool: KVPool) -> Tensor:
        batch = len(embedded)
        nothing = embedded.new_zeros(batch, 1, self._width), _int32(batch, 1), _int32(batch)
        return self.draft_behind(embedded, rows, pool, *nothing)

    def draft_behind(
        self, embedded: Tensor, rows: Rows, pool: KVPool, features: Tensor, positions: Tensor, length: Tensor
    ) -> Tensor:
        """As `draft`, with context behind `rows.context_len` that the pages do not hold yet.

        Of its features [B, C, n·E] at `positions` [B, C] the first `length` [B] of each request are real.
        """
        return self._session.run(_inputs(embedded, rows, pool) | _features(features, positions, length))["hidden"]

    def context_keys_values(self, features: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """As `Drafter`'s; one masked row is drafted beside it, for nothing."""
        body, batch = self.config.body, len(features)
        pool = KVPool(body.num_layers, 1, self._page_size, body.num_kv_heads, body.head_dim, self._dtype, "cpu")
        rows = Rows.chain(1, torch.zeros(batch, 1, dtype=torch.long), torch.zeros(batch, dtype=torch.long))
        embedded = features.new_zeros(batch, 1, body.hidden_size)
        new = _features(features, positions, _int32(batch))
        out = self._session.run(_inputs(embedded, rows, pool) | new)
        return out["k"], out["v"]


def _int32(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def _features(features: Tensor, positions: Tensor, length: Tensor) -> dict[str, Tensor]:
    return {"features": features.contiguous(), "feature_positions": positions.int(), "feature_len": length.int()}


def _inputs(embedded: Tensor, rows: Rows, pool: KVPool) -> dict[str, Tensor]:
    pages = {
        f"{kind}_pages_{i}": layer for kind, pages in (("k", pool.k), ("v", pool.v)) for i, layer in enumerate(pages)
    }
    return {
        "embedded": embedded.contiguous(),
        "positions": rows.positions.int(),
        "visible": pack_visible(rows.visible),
        "page_table": rows.page_table.int(),
        "context_len": rows.context_len.int(),
        **pages,
    }
