"""A target's Hugging Face folder as it is stored: 16 or 32 bit weights, or ModelOpt's unified FP8 with its scales."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from d2sd.convert.hf_config import HFConfig
from d2sd.convert.quantization import read_quantization
from d2sd.convert.target import parse_target_config, target_shapes
from d2sd.convert.weights import TensorInfo, read_headers, read_tensor
from d2sd.errors import CheckpointError
from d2sd.modeling.config import DecoderConfig


@dataclass(frozen=True, slots=True)
class Source:
    """An opened folder, its names checked against its configuration."""

    folder: Path
    config: DecoderConfig
    tensors: dict[str, TensorInfo]
    fp8: bool
    fp8_kv: bool

    def get(self, name: str) -> Tensor:
        tensor = read_tensor(self.tensors[name].file, name)
        if not bool(tensor.float().isfinite().all()):
            raise CheckpointError("A tensor holds NaN or infinity.", where=f"{self.tensors[name].file}: {name}")
        return tensor

    def scale(self, name: str) -> Tensor:
        """A positive scale, as [1] fp32."""
        scale = self.get(name).float().reshape(1)
        if not scale.item() > 0:
            raise CheckpointError(
                "A scale is not positive.", where=f"{self.tensors[name].file}: {name}", found=scale.item()
            )
        return scale


def open_source(folder: Path) -> Source:
    """Open a target; FP8 is all of its linear layers or none. Raises `CheckpointError`."""
    raw = HFConfig.read(folder)
    config = parse_target_config(raw)
    quantization = read_quantization(folder, raw)
    fp8, fp8_kv = quantization is not None, quantization is not None and quantization.kv
    found = read_headers(folder)
    shapes = {n if n.startswith("lm_head") else f"model.{n}": shape for n, shape in target_shapes(config).items()}
    expected = set(shapes)
    linears = {n.removesuffix(".weight") for n in expected if "_proj.weight" in n}
    if fp8:
        expected |= {f"{name}.{scale}" for name in linears for scale in ("weight_scale", "input_scale")}
    if fp8_kv:
        expected |= {f"{n}.{n[-6]}_scale" for n in linears if n.endswith(("k_proj", "v_proj"))}
    if config.tie_word_embeddings:
        found.pop("lm_head.weight", None)  # the embedding again
    odd = sorted(expected ^ found.keys())
    kinds = {name for name in linears if (found[f"{name}.weight"].dtype == "F8_E4M3") != fp8} if not odd else set()
    if odd or kinds:
        raise CheckpointError(
            "The tensors are not those of the configuration.", where=folder,
            found=", ".join((odd or sorted(kinds))[:8]),
            expected="every linear layer in FP8 with its scales" if fp8 else "16 or 32 bit weights, no scales",
        )  # fmt: skip
    for name, shape in shapes.items():
        if found[name].shape != shape:
            raise CheckpointError(
                "A tensor has the wrong shape.", where=f"{found[name].file}: {name}", found=list(found[name].shape),
                expected=list(shape),
            )  # fmt: skip
    return Source(folder, config, found, fp8, fp8_kv)
