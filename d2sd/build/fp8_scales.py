"""FP8 scales from NVIDIA ModelOpt (extra `fp8`): max calibration of weights and layer inputs on real text.

The target is quantized as a transformers model and exported by ModelOpt; a drafter, which transformers does not
support, is quantized in place while d2sd's decoding loop runs it.
"""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from d2sd.convert.checkpoint.offline import offline_transformers
from d2sd.convert.checkpoint.quantization import Quantization
from d2sd.convert.drafter_kind import DrafterKind
from d2sd.errors import BuildError, CheckpointError
from d2sd.extras import install_line
from d2sd.modeling.drafters.interface import DraftModel
from d2sd.plugins.shared.fp8 import LARGEST, to_pages
from d2sd.progress import Progress, silent

PACKAGE = "nvidia-modelopt"
#: Layers of one input get one scale, as in a target that ModelOpt exports: engines compute them as one product.
JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@dataclass(frozen=True, slots=True)
class ModelOpt:
    """The modules of ModelOpt that are used."""

    version: str
    quantization: Any  # modelopt.torch.quantization
    export: Any  # modelopt.torch.export


def load_modelopt(progress: Progress = silent) -> ModelOpt:
    """Import ModelOpt, which takes half a minute on a slow machine. Raises `BuildError` where it is not installed."""
    try:
        installed = version(PACKAGE)
    except PackageNotFoundError:
        raise BuildError(
            "FP8 is calibrated by NVIDIA ModelOpt, which is not installed.", where="fp8", fix=install_line("fp8")
        ) from None
    offline_transformers()
    with progress("starting ModelOpt"), _quiet():
        import modelopt.torch.export as export
        import modelopt.torch.quantization as quantization
    return ModelOpt(installed, quantization, export)


def quantize_target(
    modelopt: ModelOpt,
    source: Path,
    directory: Path,
    texts: Sequence[Sequence[int]],
    *,
    dtype: torch.dtype,
    kv: bool,
    progress: Progress = silent,
) -> None:
    """Export the 16-bit checkpoint `source` to `directory` as unified FP8, calibrated on token ids `texts`.

    Every linear layer except the head is FP8; K/V too if `kv`. The tokenizer is not copied.
    """
    model = _pretrained(source, dtype)
    config = modelopt.quantization.FP8_DEFAULT_CFG
    if kv:
        with _quiet():
            config = modelopt.quantization.utils.update_quant_cfg_with_kv_cache_quant(
                config, modelopt.quantization.FP8_KV_CFG["quant_cfg"]
            )

    def read_all(model: Any) -> None:
        with progress("calibrating the target", len(texts)) as advance:
            for text in texts:
                model(torch.tensor([text]))
                advance(1)

    with torch.inference_mode(), _quiet():
        modelopt.quantization.quantize(model, config, read_all)
        modelopt.export.export_hf_checkpoint(model, export_dir=directory)


class Quantized(NamedTuple):
    """A drafter as a checkpoint holds it."""

    tensors: dict[str, Tensor]
    description: Quantization
    input_scales: dict[str, float]  # of layers that stay in 16 bits there, and that d2sd runs in FP8


def quantize_drafter(
    modelopt: ModelOpt, kind: DrafterKind[Any, Any], drafter: DraftModel, run: Callable[[], object]
) -> Quantized:
    """Calibrate `drafter` in place while `run` drafts with it.

    Raises `BuildError` where a layer was never run or its input was zero.
    """
    linears = kind.fp8_layers(drafter.config)
    described = Quantization(kind.unquantized, kv=False, producer=("modelopt", modelopt.version))
    narrow = set(described.of(linears))
    tensors = drafter.state_dict()
    per_tensor = {"num_bits": (4, 3), "axis": None}
    quantizers = [
        {"quantizer_name": f"*{name}.{part}_quantizer", "cfg": per_tensor}
        for name in linears
        for part in ("weight", "input")
    ]
    config = {"quant_cfg": [{"quantizer_name": "*", "enable": False}, *quantizers], "algorithm": "max"}
    with _quiet():
        modelopt.quantization.quantize(drafter, config, lambda _: run())
    for group in JOINED:
        for first in (name for name in linears if name in narrow and name.endswith(group[0])):
            parts = [first.removesuffix(group[0]) + part for part in group]
            modelopt.export.quant_utils.preprocess_linear_fusion([drafter.get_submodule(part) for part in parts])
    scales: dict[str, float] = {}
    for name in linears:
        layer: Any = drafter.get_submodule(name)
        for part, quantizer in (("weight", layer.weight_quantizer), ("input", layer.input_quantizer)):
            largest = quantizer.amax
            if largest is None or not 0 < largest.item() < float("inf"):
                raise BuildError(
                    "A drafter's layer cannot be calibrated.",
                    where=f"{name}: largest {part}",
                    found=None if largest is None else largest.item(),
                    expected="a positive number",
                )
            scale = largest.detach().float().reshape(()) / LARGEST
            if name in narrow:
                tensors[f"{name}.{part}_scale"] = scale
            elif part == "input":
                scales[name] = scale.item()
        if name in narrow:
            tensors[f"{name}.weight"] = to_pages(tensors[f"{name}.weight"], tensors[f"{name}.weight_scale"])
    return Quantized(tensors, described, scales)


def _pretrained(source: Path, dtype: torch.dtype) -> Any:
    try:
        model = offline_transformers().AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype, local_files_only=True, trust_remote_code=False, use_safetensors=True
        )
    except (OSError, ValueError) as error:
        raise CheckpointError("transformers cannot read the target.", where=source, found=error) from None
    return model.eval()


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress ModelOpt's output and warnings, but not stderr, where progress is drawn."""
    level = logging.root.manager.disable
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(level)
