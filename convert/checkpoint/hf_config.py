"""Strict reading of a Hugging Face `config.json`: every value is typed, every error names file and key."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, TypeVar

from d2sd.errors import CheckpointError
from d2sd.io import read_json
from d2sd.modeling.config import RopeConfig

T = TypeVar("T")
#: Largest size of a dimension, a vocabulary or a context: real ones are below, and products of two fit 64 bits.
MAX_SIZE = 1 << 24
#: Maximum layers of a model. Real models have up to about 200, and a module is built to get names and shapes.
MAX_LAYERS = 1024

#: Keys of a rope dictionary, new (`rope_parameters`) or old (`rope_scaling`), by our field's name.
_ROPE_NUMBERS = {
    "factor": "factor",
    "original_max_position_embeddings": "original_max_positions",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "attention_factor": "attention_factor",
}
_MSCALES = ("mscale", "mscale_all_dim")
#: Required keys of each kind.
_ROPE_NEEDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}


class HFConfig:
    """A `config.json` (or a part of one) whose getters raise `CheckpointError`."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self.values, self.where = values, where

    @classmethod
    def read(cls, directory: Path) -> HFConfig:
        """Read `directory/config.json`."""
        if not directory.is_dir():
            raise CheckpointError(
                "No such checkpoint directory.",
                where=directory,
                fix="download the checkpoint to that folder, or correct the path that names it",
            )
        path = directory / "config.json"
        if not path.exists():
            raise CheckpointError(
                "Not a checkpoint: it has no config.json.", where=directory, fix="pass the folder that contains it"
            )
        return cls.of_file(path)

    @classmethod
    def of_file(cls, path: Path) -> HFConfig:
        """Read a file that holds one JSON object."""
        values = read_json(path, error=CheckpointError)
        if not isinstance(values, dict):
            raise CheckpointError(f"{path.name} is not a JSON object.", where=path, found=type(values).__name__)
        return cls(values, str(path))

    def refuse(self, what: str, key: str, expected: object, fix: str | None = None) -> CheckpointError:
        """Return the error for an unsupported value of `key`."""
        found = json.dumps(self.values.get(key))
        return CheckpointError(what, where=f"{self.where}: {key}", found=found, expected=expected, fix=fix)

    def get(self, key: str, kind: type[T], default: T | None = None) -> T:
        """Return the value of `key`; a missing or null one is `default`, or an error without a default."""
        value = self.values.get(key)
        if value is None:
            if default is None:
                raise CheckpointError("A key is missing.", where=f"{self.where}: {key}", expected=kind.__name__)
            return default
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:  # exact: a bool is not accepted as int
            raise self.refuse("A value has the wrong type.", key, kind.__name__)
        return value

    def size(self, key: str, default: int | None = None, limit: int = MAX_SIZE) -> int:
        """Return an integer of 1 to `limit`."""
        value = self.get(key, int, default)
        if not 1 <= value <= limit:
            raise self.refuse("A size is out of range.", key, f"1 to {limit}")
        return value

    def layers(self, key: str) -> int:
        """Return a number of layers."""
        return self.size(key, limit=MAX_LAYERS)

    def only(self, key: str, *allowed: object) -> None:
        """Refuse `key` if it is present with a value outside `allowed`."""
        if key in self.values and self.values[key] not in allowed:
            raise self.refuse("This feature is not supported.", key, " or ".join(json.dumps(a) for a in allowed))

    def required(self, key: str, *allowed: T) -> T:
        """Return the value of `key`, which must be there and one of `allowed`, in the type that stands there."""
        if key not in self.values:
            raise self.refuse("A key is missing.", key, " or ".join(map(json.dumps, allowed)))
        self.only(key, *allowed)
        return allowed[allowed.index(self.values[key])]

    def part(self, key: str) -> HFConfig:
        """Return the nested object under `key`."""
        return HFConfig(self.get(key, dict), f"{self.where}: {key}")

    def integers(self, key: str) -> tuple[int, ...]:
        """Return a list of integers as a tuple."""
        values = self.get(key, list)
        if not all(type(value) is int for value in values):
            raise self.refuse("This list may hold only integers.", key, "integers")
        return tuple(values)

    def layer_types(self, usual: list[str], *kinds: str, both: bool = False) -> list[str]:
        """The kind of each layer, one of `kinds`, by `layer_types`; `usual` where that is missing.

        `both`: each kind must be there.
        """
        types = self.get("layer_types", list, usual)
        known = len(types) == len(usual) and all(kind in kinds for kind in types)
        if not known or (both and not all(kind in types for kind in kinds)):
            expected = f"{' or '.join(kinds)} of each of {len(usual)} layers{', and both' if both else ''}"
            raise self.refuse("These layers are not supported.", "layer_types", expected)
        return types

    def windows(self, pattern: list[str], num_layers: int) -> tuple[int | None, ...]:
        """Windows of the layers by `layer_types`, or by `pattern` in turns where that is missing; None: no window."""
        types = self.layer_types((pattern * num_layers)[:num_layers], "sliding_attention", "full_attention")
        return tuple(self.size("sliding_window") if kind == "sliding_attention" else None for kind in types)

    def logit_cap(self) -> float | None:
        """The soft cap of logits; None: there is none."""
        key = "final_logit_softcapping"
        if self.values.get(key) is None:
            return None
        cap = self.get(key, float)
        if not 0 < cap <= MAX_SIZE:
            raise self.refuse("The soft cap of logits is out of range.", key, f"up to {MAX_SIZE}")
        return cap

    def rope(self) -> RopeConfig:
        """Read RoPE in either spelling: `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling`.

        In a file with both they must agree: of two scalings transformers uses the old one, of two thetas the new one.
        """
        key = "rope_parameters" if self.values.get("rope_parameters") else "rope_scaling"
        part = HFConfig(self.get(key, dict, {}), f"{self.where}: {key}")
        self._check_spellings_agree(part)
        # Llama's first configs omit theta, and transformers uses 10000; elsewhere a missing theta is an error.
        default = 10000.0 if self.values.get("model_type") == "llama" else None
        theta = (part if "rope_theta" in part.values else self).get("rope_theta", float, default)
        name = "rope_type" if "rope_type" in part.values else "type"
        kind = part.get(name, str, "default")
        if kind not in _ROPE_NEEDS:
            raise part.refuse("This RoPE variant is not supported.", name, ", ".join(_ROPE_NEEDS))
        part.only("partial_rotary_factor", None, 1.0)
        yarn = ("truncate", *_MSCALES) if kind == "yarn" else ()
        known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *_ROPE_NUMBERS, *yarn}
        unknown = part.values.keys() - known
        if unknown:
            raise part.refuse("This RoPE setting is not supported.", min(unknown), ", ".join((*_ROPE_NUMBERS, *yarn)))
        for needed in _ROPE_NEEDS[kind]:
            part.get(needed, float)
        numbers: dict[str, Any] = {
            field: part.get(key, float) for key, field in _ROPE_NUMBERS.items() if part.values.get(key) is not None
        }
        original = int(numbers.pop("original_max_positions", 0))
        if kind == "yarn":
            if not original:  # as transformers fills it in
                original = self.size("max_position_embeddings")
            numbers = {
                "truncate": part.get("truncate", bool, True),
                **_attention_factor(part, numbers["factor"]),
                **numbers,
            }
        return RopeConfig(theta=theta, kind=kind, original_max_positions=original, **numbers)  # type: ignore[arg-type]

    def _check_spellings_agree(self, part: HFConfig) -> None:
        """Refuse a theta or a scaling given in both spellings with different values; `part` is the one that is read."""
        theta, scaling = self.values.get("rope_theta"), self.values.get("rope_scaling")
        if theta is not None and part.values.get("rope_theta", theta) != theta:
            expected = f"{part.values['rope_theta']}, as in {part.where.rpartition(': ')[2]}"
            fix = "keep the one that the model was trained with"
            raise self.refuse("rope_theta is given twice, with different values.", "rope_theta", expected, fix)
        if scaling and _scaling(self.get("rope_scaling", dict)) != _scaling(part.values):
            raise self.refuse(
                "RoPE scaling is given twice, with different values.",
                "rope_scaling",
                "null, or the scaling of rope_parameters",
            )


def _attention_factor(part: HFConfig, factor: float) -> dict[str, float]:
    """DeepSeek's spelling of YaRN's factor: transformers uses both numbers, and ignores one alone."""
    if not all(part.values.get(key) for key in _MSCALES):
        return {}
    above, below = ((0.1 * part.get(key, float) * math.log(factor) + 1) if factor > 1 else 1.0 for key in _MSCALES)
    return {"attention_factor": above / below}


def _scaling(values: dict[str, Any]) -> dict[str, Any]:
    """A rope dictionary without theta, under the newer name of its kind."""
    return {"rope_type" if key == "type" else key: v for key, v in values.items() if key != "rope_theta"}


def rope_fields(rope: RopeConfig) -> dict[str, object]:
    """Return `rope_theta` and `rope_scaling`: the spelling that all readers support, including transformers 4 and 5."""
    if rope.kind == "default":
        return {"rope_theta": rope.theta, "rope_scaling": None}
    scaling: dict[str, object] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind in ("llama3", "yarn"):
        scaling["original_max_position_embeddings"] = rope.original_max_positions
    if rope.kind == "llama3":
        scaling |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        scaling |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
        if rope.attention_factor is not None:
            scaling["attention_factor"] = rope.attention_factor
        if not rope.truncate:
            scaling["truncate"] = False
    return {"rope_theta": rope.theta, "rope_scaling": scaling}
