"""How checkpoints store experts, which our module holds stacked: gates, ups and downs each under a name, or joined.

A row is a function from a layer's `ExpertsConfig` and hidden size to what each stored tensor is a part of. The tensors
of a checkpoint are checked, read and written under its own names; they are placed when a module is filled.

    stacked         mlp.router.{weight,bias} · mlp.experts.gate_up_proj [X, E, 2I], gates and ups in turns, and its bias
                    [X, 2I] · mlp.experts.down_proj [X, I, E] and its bias [X, E]
    per expert      mlp.gate.weight [X, E] · mlp.experts.{i}.{gate,up}_proj.weight [I, E] · down_proj.weight [E, I]
                    mlp.expert_bias [X], where it counts in the choice
    joined          mlp.gate.weight [X, E] · mlp.experts.gate_up_proj [X, 2I, E] · mlp.experts.down_proj [X, E, I]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from d2sd.convert.checkpoint.headers import Shapes
from d2sd.convert.checkpoint.hf_config import HFConfig
from d2sd.modeling.config import BodyConfig, ExpertsConfig
from d2sd.modeling.shard import Cut

if TYPE_CHECKING:
    from torch import Tensor

# Shape letters: X experts, E hidden, I intermediate.


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A tensor of a checkpoint. `view` makes of ours the part that it fills, in the order of its elements."""

    ours: str
    shape: tuple[int, ...]
    view: Callable[[Tensor], Tensor]


#: Experts of a layer: real models have up to a few hundred, and names are listed for each.
MAX_EXPERTS = 4096
#: Parts of a layer's experts by the name in the checkpoint; both names without what stands before `mlp.`.
ExpertTensors = Callable[[ExpertsConfig, int], "dict[str, StoredPart]"]


def per_expert(config: ExpertsConfig, hidden: int) -> dict[str, StoredPart]:
    """Qwen's layout, and LFM2's under its names."""
    inner = config.intermediate_size
    gates, ups = slice(inner), slice(inner, None)
    parts = {"mlp.gate.weight": StoredPart("mlp.router.weight", (config.count, hidden), _all)}
    if config.sigmoid:
        parts["mlp.expert_bias"] = StoredPart("mlp.router.choice_bias", (config.count,), _all)
    for i in range(config.count):
        name = f"mlp.experts.{i}"
        for kind, rows in (("gate", gates), ("up", ups)):
            parts[f"{name}.{kind}_proj.weight"] = StoredPart("mlp.gate_up", (inner, hidden), partial(_of, i, rows))
        parts[f"{name}.down_proj.weight"] = StoredPart("mlp.down", (hidden, inner), partial(_of, i, slice(None)))
    return parts


def stacked(config: ExpertsConfig, hidden: int) -> dict[str, StoredPart]:
    """gpt-oss's layout."""
    count, inner = config.count, config.intermediate_size
    return {
        "mlp.router.weight": StoredPart("mlp.router.weight", (count, hidden), _all),
        "mlp.router.bias": StoredPart("mlp.router.bias", (count,), _all),
        "mlp.experts.gate_up_proj": StoredPart("mlp.gate_up", (count, hidden, 2 * inner), _in_turns),
        "mlp.experts.gate_up_proj_bias": StoredPart("mlp.gate_up_bias", (count, 2 * inner), _in_turns),
        "mlp.experts.down_proj": StoredPart("mlp.down", (count, inner, hidden), lambda x: x.mT),
        "mlp.experts.down_proj_bias": StoredPart("mlp.down_bias", (count, hidden), _all),
    }


def joined(config: ExpertsConfig, hidden: int) -> dict[str, StoredPart]:
    """Qwen3.5's layout, as transformers holds Qwen's experts in memory."""
    count, inner = config.count, config.intermediate_size
    return {
        "mlp.gate.weight": StoredPart("mlp.router.weight", (count, hidden), _all),
        "mlp.experts.gate_up_proj": StoredPart("mlp.gate_up", (count, 2 * inner, hidden), _all),
        "mlp.experts.down_proj": StoredPart("mlp.down", (count, hidden, inner), _all),
    }


def layout_in(names: Iterable[str], usual: ExpertTensors | None) -> ExpertTensors | None:
    """The layout of a checkpoint with tensors of these names, of a family with the layout `usual`."""
    is_joined = usual is per_expert and any(name.endswith("mlp.experts.gate_up_proj") for name in names)
    return joined if is_joined else usual


def expert_counts(config: HFConfig) -> tuple[int, int]:
    """Experts of a layer, and of a row.

    The key on the hub is `num_experts` or, of gpt-oss and of what transformers 5 writes, `num_local_experts`.
    """
    keys = [key for key in ("num_experts", "num_local_experts") if config.values.get(key) is not None]
    count = config.size(keys[-1] if keys else "num_experts", limit=MAX_EXPERTS)
    if any(config.values[key] != count for key in keys):
        raise config.refuse("The number of experts is given twice, with different values.", keys[0], count)
    return count, config.size("num_experts_per_tok", limit=count)


def qwen_experts(config: HFConfig, num_layers: int, *, normalized: bool) -> ExpertsConfig | None:
    """Experts in all layers but those that Qwen's keys name; `normalized` is transformers' default of the family."""
    every = config.size("decoder_sparse_step", 1)
    alone = config.integers("mlp_only_layers") if config.values.get("mlp_only_layers") is not None else ()
    if not set(alone) <= set(range(num_layers)):
        what = "The config names a layer that is not there."
        raise config.refuse(what, "mlp_only_layers", f"0 to {num_layers - 1}")
    dense = tuple(i for i in range(num_layers) if i in alone or (i + 1) % every)
    if len(dense) == num_layers:
        return None
    return ExpertsConfig(
        *expert_counts(config),
        intermediate_size=config.size("moe_intermediate_size"),
        normalized=config.get("norm_topk_prob", bool, normalized),
        dense_layers=dense,
    )


def _in_turns(x: Tensor) -> Tensor:
    """x [X, 2I, E] or [X, 2I], gates before ups -> [X, E, I, 2] or [X, I, 2]."""
    return x.view(len(x), 2, -1, *x.shape[2:]).transpose(1, -1)


def _all(x: Tensor) -> Tensor:
    return x


def _of(expert: int, rows: slice, x: Tensor) -> Tensor:
    """Rows of one expert's matrix in x [X, N, K]."""
    return x[expert, rows]


class ExpertMap:
    """The stored tensors of all layers' experts, without the leading `model.`; none for a model without experts."""

    def __init__(self, body: BodyConfig, layout: ExpertTensors | None) -> None:
        self.parts: dict[str, StoredPart] = {}
        if body.experts is None:
            return
        assert layout is not None
        of_layer = layout(body.experts, body.hidden_size)
        for index in sorted(set(range(body.num_layers)) - set(body.experts.dense_layers)):
            for name, part in of_layer.items():
                ours = f"layers.{index}.{part.ours}"
                self.parts[f"layers.{index}.{name}"] = StoredPart(ours, part.shape, part.view)

    def stored(self, shapes: Shapes) -> dict[str, tuple[int, ...]]:
        """Names and shapes of a checkpoint from those of our module."""
        joined = {part.ours for part in self.parts.values()}
        alone = {name: shape for name, shape in shapes.items() if name not in joined}
        return alone | {name: part.shape for name, part in self.parts.items()}

    def cuts(self, whole: ExpertMap, rank: int) -> dict[str, Cut]:
        """The parts of the stored tensors of `whole` of which a rank's, these, are made."""
        cuts = {}
        for name, part in self.parts.items():
            for axis, (all_of_it, own) in enumerate(zip(whole.parts[name].shape, part.shape, strict=True)):
                if own != all_of_it:
                    cuts[name] = Cut(axis, rank * own, (rank + 1) * own)
        return cuts

    def placed(self, read: Iterable[Mapping[str, Tensor]], shapes: Shapes) -> dict[str, Tensor]:
        """Our module's tensors, of these `shapes`, from a checkpoint's, file by file; each part is copied once."""
        tensors: dict[str, Tensor] = {}
        for file in read:
            for name, tensor in file.items():
                part = self.parts.get(name)
                if part is None:
                    tensors[name] = tensor
                    continue
                if part.ours not in tensors:
                    tensors[part.ours] = tensor.new_empty(shapes[part.ours])
                view = part.view(tensors[part.ours])
                view.copy_(tensor.view(view.shape))
        return tensors

    def taken(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """The inverse of `placed`."""
        joined = {part.ours for part in self.parts.values()}
        yield from ((name, tensor) for name, tensor in tensors.items() if name not in joined)
        for name, part in self.parts.items():
            yield name, part.view(tensors[part.ours]).reshape(part.shape)
