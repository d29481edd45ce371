"""The table of quantization schemes: how a checkpoint's linear layers are stored, and what computes them.

A row is a scheme: the module whose tensors are the checkpoint's, by name and shape, which says what they dequantize to;
and the product that serves it. A scheme without one is dequantized on request, or refused. Readers of the descriptions
in config.json (`dialects.py`, `quantization.py`) choose rows; nothing else knows schemes apart.
"""

from __future__ import annotations

import fnmatch
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import regex  # type: ignore[import-untyped, unused-ignore]  # a user has no types of it

from d2sd.errors import CheckpointError
from d2sd.modeling import scheme as stored
from d2sd.modeling.scheme import Scheme
from d2sd.modeling.shapes import Shape

_TENSOR_WISE = "torch._scaled_mm with a scale a tensor (compute capability 8.9); elsewhere carried in a wider type"
_ROW_WISE = "torch._scaled_mm with a scale a row (compute capability 8.9); elsewhere carried in a wider type"
_BLOCK_WISE = (
    "torch's scaled_mm with 1 × 128 and 128 × 128 scales (compute capability 9.0); elsewhere carried in a wider type"
)
_FP4 = "torch's scaled_mm of NVFP4 (compute capability 10.0); carried in a wider type on CPUs; other GPUs refuse it"


#: The modules of schemes, and what gives their tensors.
_TENSORS: Mapping[str, Callable[..., dict[str, Shape]]] = {
    "fp8.Fp8Linear": stored.fp8,
    "scaled_fp8.ScaledFp8Linear": stored.scaled_fp8,
    "scaled_fp8.BlockFp8Linear": stored.block_fp8,
    "nvfp4.Nvfp4Linear": stored.nvfp4,
    "nvfp4.Nvfp4Weights": stored.nvfp4_weights,
    "mxfp4.Mxfp4Experts": stored.mxfp4,
}


def _row(name: str, layer: str, product: str | None, **options: Any) -> Scheme:
    return Scheme(name, layer, _TENSORS[layer], tuple(sorted(options.items())), product)


#: One calibrated scale for the weights of a layer, and one for its inputs: ModelOpt's FP8, and what d2sd builds.
FP8 = _row("FP8", "fp8.Fp8Linear", _TENSOR_WISE)
FP8_CHANNELS = _row("FP8, a scale a channel", "scaled_fp8.ScaledFp8Linear", _ROW_WISE, channels=True, calibrated=True)
FP8_DYNAMIC = _row(
    "FP8, a scale a channel and a token", "scaled_fp8.ScaledFp8Linear", _ROW_WISE, channels=True, calibrated=False
)
FP8_TENSOR_DYNAMIC = _row(
    "FP8, a scale a token", "scaled_fp8.ScaledFp8Linear", _ROW_WISE, channels=False, calibrated=False
)
FP8_BLOCKS = _row("FP8 in blocks of 128 × 128", "scaled_fp8.BlockFp8Linear", _BLOCK_WISE, scale_name="weight_scale_inv")
FP8_BLOCKS_COMPRESSED = _row(
    "FP8 in blocks of 128 × 128", "scaled_fp8.BlockFp8Linear", _BLOCK_WISE, scale_name="weight_scale"
)
FP8_WEIGHTS = _row("FP8 weights alone", "scaled_fp8.ScaledFp8Linear", None, channels=True, calibrated=False)
FP8_TENSOR_WEIGHTS = _row("FP8 weights alone", "scaled_fp8.ScaledFp8Linear", None, channels=False, calibrated=False)
NVFP4 = _row("NVFP4", "nvfp4.Nvfp4Linear", _FP4, divisors=False)
NVFP4_COMPRESSED = _row("NVFP4", "nvfp4.Nvfp4Linear", _FP4, divisors=True)
#: gpt-oss's experts, all of a layer in one tensor.
MXFP4 = _row("MXFP4", "mxfp4.Mxfp4Experts", None)
NVFP4_WEIGHTS = _row("NVFP4 weights alone", "nvfp4.Nvfp4Weights", None, divisors=False)
NVFP4_WEIGHTS_COMPRESSED = _row("NVFP4 weights alone", "nvfp4.Nvfp4Weights", None, divisors=True)

#: Whether a pattern of a dialect names a module; the last argument is the time by which that must be known.
Matches = Callable[[str, str, float], bool]


def by_wildcard(pattern: str, name: str, until: float) -> bool:
    """ModelOpt: `*` is any text."""
    return _matches(_translated(pattern), name, until)


def by_regex(pattern: str, name: str, until: float) -> bool:
    """compressed-tensors: a name, or behind `re:` a regular expression for its beginning."""
    return _matches(pattern[3:], name, until) if pattern.startswith("re:") else pattern == name


def by_part(pattern: str, name: str, _until: float) -> bool:
    """transformers' `modules_to_not_convert`: a name, a module that contains it, or the last part of it."""
    return name == pattern or name.startswith(f"{pattern}.") or name.endswith(f".{pattern}")


#: Seconds in which the patterns of a checkpoint must have been matched with its layers.
_SECONDS = 10


def _matches(pattern: str, name: str, until: float) -> bool:
    """Python's `re` may need a time that is exponential in the length of the name; `regex` has a limit."""
    try:
        return _compiled(pattern).match(name, timeout=max(until - time.monotonic(), 1e-3)) is not None
    except (TimeoutError, RecursionError, regex.error) as error:
        raise CheckpointError(
            "A pattern for names of layers takes too long.",
            where="config.json: quantization_config",
            found=f"{pattern} ({error})",
            fix="write the layers' names in its place",
        ) from None


_compiled, _translated = lru_cache(4096)(regex.compile), lru_cache(4096)(fnmatch.translate)
_MATCHES: Mapping[str, Matches] = {"wildcard": by_wildcard, "regex": by_regex, "part": by_part}
#: The target of a group that takes every linear layer.
EVERY = "Linear"


@dataclass(frozen=True, slots=True)
class Quantization:
    """How linear layers are stored: those of a group by its scheme, but for what a pattern of `exclude` matches."""

    exclude: tuple[str, ...]
    kv: bool  # K and V are FP8
    producer: tuple[str, str]  # name and version
    #: Schemes, and patterns of the layers that they are of.
    groups: tuple[tuple[Scheme, tuple[str, ...]], ...] = ((FP8, (EVERY,)),)
    patterns: str = "wildcard"
    #: `quantization_config`, which a copy of the checkpoint keeps; None: written as ModelOpt does.
    source: Mapping[str, Any] | None = field(default=None, compare=False)

    def schemes(self, names: Iterable[str], prefix: str = "") -> dict[str, Scheme]:
        """The schemes of those of the linear layers `names` that are quantized; patterns match `prefix` + name."""
        until = time.monotonic() + _SECONDS
        found = {name: self._scheme(prefix + name, until) for name in names}
        return {name: scheme for name, scheme in found.items() if scheme is not None}

    def of(self, names: Iterable[str], prefix: str = "") -> list[str]:
        """Schemes of the linear layers `names` that are quantized."""
        return list(self.schemes(names, prefix))

    def _scheme(self, name: str, until: float) -> Scheme | None:
        matches = _MATCHES[self.patterns]
        if any(matches(pattern, name, until) for pattern in self.exclude):
            return None
        named = (scheme for scheme, targets in self.groups if any(matches(target, name, until) for target in targets))
        every = (scheme for scheme, targets in self.groups if EVERY in targets)
        return next(named, next(every, None))

    @property
    def text(self) -> str:
        """The schemes in words."""
        return " and ".join(dict.fromkeys(scheme.name for scheme, _ in self.groups))

    @property
    def products(self) -> list[str]:
        """The products of all schemes in words."""
        return list(dict.fromkeys(scheme.product for scheme, _ in self.groups if scheme.product is not None))

    @property
    def unserved(self) -> str | None:
        """The first scheme that has no product."""
        return next((scheme.name for scheme, _ in self.groups if scheme.product is None), None)
