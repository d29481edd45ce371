"""A kind of drafter: one record for all that a build, a bundle and training do with a drafter of a kind.

The records are in `d2sd.convert.kinds`, one module a kind. What kinds do alike is here, in the record's methods.

Bundles and training hold a drafter as a directory: `config.json`, `model.safetensors`, and, in files of their own since
the layouts have no keys for them, a reduced draft vocabulary and FP8 that only d2sd runs (`own_files.py`). FP8 is
described as in every checkpoint (`quantization.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar, cast

from pydantic import JsonValue

from d2sd.convert.checkpoint.headers import Rename, check_headers, read_headers, stored_as
from d2sd.convert.checkpoint.hf_config import HFConfig
from d2sd.convert.checkpoint.own_files import read_fp8_inputs, write_draft_vocabulary, write_fp8_inputs
from d2sd.convert.checkpoint.quantization import FILE, KEY, Quantization, described, read_drafter_quantization
from d2sd.convert.checkpoint.schemes import FP8
from d2sd.convert.checkpoint.unsupported import refuse_tensors
from d2sd.io import write_json
from d2sd.modeling.config import DecoderConfig, DraftConfig
from d2sd.modeling.shapes import Parts, shapes_of
from d2sd.policies import DrafterRole

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from d2sd.modeling.decoder import Decoder
    from d2sd.modeling.drafters.interface import DraftModel

Config = TypeVar("Config", bound=DraftConfig)
Model = TypeVar("Model", bound="DraftModel")


@dataclass(frozen=True, slots=True)
class Code(Generic[Model]):
    """The code that runs a kind of drafter."""

    model: type[Model]
    #: The part that is exported, of a drafter that is attached to its target.
    graph_body: Callable[[Model], nn.Module]
    #: Takes what a drafter shares with the target, which is whole; comes before any pass.
    attach: Callable[[Model, Decoder], None]


@dataclass(frozen=True, slots=True)
class DrafterKind(Generic[Config, Model]):
    """A kind of drafter: its fields are what differs from kind to kind."""

    #: Imports its code, and PyTorch, which descriptions of a drafter do not need.
    code: Callable[[], Code[Model]]
    #: Its tensors.
    parts: Callable[[Config], Parts]
    #: Whether a config.json is of this kind; of DFlash is what no other kind says is its own.
    is_marked: Callable[[HFConfig], bool]
    #: Reads the config and the draft vocabulary of a folder; raises `CheckpointError` naming file and key. A second
    #: argument declares the role of a drafter whose config has none.
    read_config: Callable[..., Config]
    #: Refuses a drafter, read from a folder, that was not made for this target, role or block size.
    check: Callable[[Config, DecoderConfig, DrafterRole, int, Path], None]
    #: Every field of `config.json` but the tensors' type and the `quantization_config`.
    config_fields: Callable[[Config], dict[str, object]]
    #: Patterns of modules that checkpoints hold in 16 bits.
    unquantized: tuple[str, ...]
    #: What a fingerprint has of the config.
    mark: Callable[[Config], str]
    #: What a manifest records of this kind alone.
    geometry: Callable[[Config], dict[str, JsonValue]]
    #: Names of the layers that can be FP8.
    fp8_layers: Callable[[Config], list[str]]
    #: Names of tensors: of a file -> of the module, None where it is unused; and back.
    our_name: Rename
    file_name: Callable[[str], str]

    @property
    def graph_body(self) -> Callable[[Model], nn.Module]:
        return self.code().graph_body

    @property
    def attach(self) -> Callable[[Model, Decoder], None]:
        return self.code().attach

    def shapes(self, config: Config, quantization: Quantization | None = None) -> dict[str, tuple[int, ...]]:
        """Names and shapes of a drafter's tensors."""
        schemes = {} if quantization is None else dict.fromkeys(quantization.of(self.fp8_layers(config)), FP8)
        return shapes_of(self.parts(config), schemes)

    def check_tensors(self, directory: Path, config: Config) -> Quantization | None:
        """Check names, shapes and types of a drafter's tensors from headers alone. Return how it is quantized."""
        quantization = _quantization(directory)
        headers = read_headers(directory)
        refuse_tensors(headers)
        check_headers(directory, headers, self.shapes(config, quantization), self.our_name)
        return quantization

    def fp8_inputs(self, directory: Path, config: Config) -> dict[str, float]:
        """Input scales of the layers that are stored in 16 bits and run in FP8; none for other drafters."""
        quantization = _quantization(directory)
        names = self.fp8_layers(config) if quantization else []
        return read_fp8_inputs(directory, sorted(set(names) - set(quantization.of(names) if quantization else ())))

    def load(self, directory: Path, dtype: torch.dtype, config: Config | None = None) -> Model:
        """Read a drafter onto the CPU in `dtype`, in eval mode and without gradients; it is not attached to a target.

        `config` is its config where that has been read, with a declared role.
        """
        from d2sd.modeling.fp8 import round_to_fp8

        module = self._stored(directory, dtype, config)
        round_to_fp8(module, self.fp8_inputs(directory, cast("Config", module.config)))
        return module

    def copy(self, source: Path, directory: Path, dtype: torch.dtype, config: Config | None = None) -> None:
        """Write the drafter of `source` with every field explicit, in `dtype`; FP8 stays as it is."""
        module = self._stored(source, dtype, config)
        config = cast("Config", module.config)
        self.write(directory, config, module.state_dict(), _quantization(source), self.fp8_inputs(source, config))

    def write(
        self,
        directory: Path,
        config: Config,
        tensors: Mapping[str, Tensor],
        quantization: Quantization | None = None,
        input_scales: Mapping[str, float] | None = None,
    ) -> None:
        """Write a drafter's directory; `tensors` is a `state_dict()` of its model, of one dtype except FP8 tensors.

        `input_scales`: of layers in 16 bits that d2sd runs in FP8.
        """
        from d2sd.convert.checkpoint.weights import write_tensors

        expected = self.shapes(config, quantization)
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        assert shapes == expected, f"not this drafter's tensors: {sorted(shapes.items() ^ expected.items())}"
        (dtype,) = {tensor.dtype for name, tensor in tensors.items() if stored_as(name, expected) == "unquantized"}
        named = {self.file_name(name): tensor for name, tensor in tensors.items()}
        write_tensors(directory / "model.safetensors", named)
        separate, inline = described(quantization) if quantization else (None, None)
        fields = self.config_fields(config) | {"dtype": str(dtype).removeprefix("torch.")}
        write_json(directory / "config.json", fields | ({KEY: inline} if inline else {}))
        if separate is not None:
            write_json(directory / FILE, separate)
        write_fp8_inputs(directory, input_scales or {})
        write_draft_vocabulary(directory, config.draft_vocabulary, config.vocab_size)

    def fingerprint(self, drafter: Model) -> str:
        """SHA-256 of a drafter's weights in bf16, by name, and of its draft vocabulary: all that determines its output.

        It is the same for a drafter loaded in fp32 and in bf16.
        """
        import torch

        digest = hashlib.sha256()
        for name, tensor in sorted(drafter.state_dict().items()):
            digest.update(f"{name} {list(tensor.shape)}".encode())
            digest.update(tensor.detach().to(torch.bfloat16).contiguous().view(torch.int16).numpy().tobytes())
        digest.update(self.mark(cast("Config", drafter.config)).encode())
        return digest.hexdigest()

    def empty(self, config: Config, quantization: Quantization | None = None) -> Model:
        """A drafter on the meta device, with FP8 layers where it is quantized."""
        import torch

        from d2sd.modeling.fp8 import make_fp8

        with torch.device("meta"):
            module = self.code().model(config)
            if quantization is not None:
                make_fp8(module, quantization.of(self.fp8_layers(config)))
        return module

    def _stored(self, directory: Path, dtype: torch.dtype, config: Config | None) -> Model:
        from d2sd.convert.checkpoint.weights import expected_shapes, fill, read_tensors

        module = self.empty(config or self.read_config(directory), _quantization(directory))
        tensors: dict[str, Tensor] = {}
        for _, part in read_tensors(directory, expected_shapes(module), dtype, self.our_name):
            tensors |= part
        fill(module, tensors)
        return module


def _quantization(directory: Path) -> Quantization | None:
    return read_drafter_quantization(directory, HFConfig.read(directory))
