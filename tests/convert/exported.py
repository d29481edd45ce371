"""Tiny pairs as ONNX graphs, exported once a run: what the tests of graphs, profiles and engines share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from d2sd.convert.kinds import DFLASH
from d2sd.convert.onnx.export import export_drafter, export_target
from d2sd.modeling.config import Family
from d2sd.modeling.decoder import Decoder
from d2sd.modeling.drafters.dflash import Drafter
from tests.tiny import tiny_decoder, tiny_drafter

#: Layers that the drafter reads, and tokens a page.
TAPS = (0, 2)
PAGE = 4
#: Qwen2 with tied embeddings, biases and heads of 8; Qwen3 with norms of heads of 16, which engines take. Llama's
#: layers are those of Qwen2 without biases, as Qwen3's are.
PAIRS: tuple[tuple[Family, torch.dtype], ...] = ("qwen2", torch.float32), ("qwen3", torch.float16)


@dataclass(frozen=True)
class Exported:
    """A target of three layers, a drafter of two, and a folder with target.onnx and drafter.onnx."""

    folder: Path
    target: Decoder
    drafter: Drafter


#: Of a family and a dtype; with windows or without.
ExportOnce = Callable[..., Exported]


def tiny_pair(family: Family, dtype: torch.dtype, *, windows: bool = False) -> tuple[Decoder, Drafter]:
    """`windows`: in some layers, with sinks in the target, and a drafter of which one layer is causal."""
    narrow: dict[str, Any] = {"windows": (5, None, 14), "sinks": True} if windows else {}
    target = tiny_decoder(family, tie=family == "qwen2", head_dim=16 if family == "qwen3" else 8, **narrow).to(dtype)
    attention: dict[str, Any] = {"windows": (None, 6), "causal": (False, True)} if windows else {}
    return target, tiny_drafter(target.config, target_layer_ids=TAPS, attention=attention).to(dtype)


def export_pair(folder: Path, target: Decoder, drafter: Drafter) -> None:
    export_target(target, TAPS, PAGE, folder / "target.onnx")
    dtype = target.embed_tokens.weight.dtype
    export_drafter(DFLASH.graph_body(drafter), drafter.config, dtype, PAGE, folder / "drafter.onnx")
