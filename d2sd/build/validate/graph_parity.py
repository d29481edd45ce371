"""Checks exported graphs: ONNX Runtime serves them, and every output is compared with the PyTorch model.

In these shadow runs a graph serves, the PyTorch model runs on the same inputs, and the differences are recorded.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from d2sd.bundle.backends import aux_layer_ids
from d2sd.bundle.load import Bundle
from d2sd.errors import BuildError
from d2sd.modeling.decoder import Decoder, DecoderOutput
from d2sd.modeling.drafters.interface import DraftModel
from d2sd.modeling.kv_pool import Chunks, KVPool, Rows
from d2sd.policies import DrafterRole, trees_of
from d2sd.runtime.backends.exported import GraphDecoder, OnnxSession, Session, graph_drafter
from d2sd.runtime.engine import Engine
from d2sd.runtime.model_runner import ModelRunner
from d2sd.runtime.request import Limits, Request
from d2sd.runtime.speculation.policy import make_policy

#: Largest difference that counts as rounding, as a share of an output's largest number.
_BOUND = {"fp32": 1e-4, "fp16": 2e-2}


def check_graphs(bundle: Bundle, requests: list[Request], plain: list[list[int]]) -> dict[str, Any]:
    """Greedy answers of the graphs against `plain`, those of plain decoding, and the largest error of every output.

    Raises `BuildError` if an error is beyond rounding; not with FP8, where one input that rounds the other way changes
    all later values. ONNX Runtime does not support bf16 on a CPU: the result then says so.
    """
    recipe, folder = bundle.recipe, bundle.path / "onnx"
    if recipe.precision == "bf16":
        return {"graphs": "not run: ONNX Runtime does not support bf16 on CPUs"}
    target = ShadowDecoder(bundle.target, aux_layer_ids(bundle), OnnxSession(folder / "target.onnx"))
    drafters: dict[DrafterRole, DraftModel] = {}
    errors = {"target": target.errors}
    for role, plain_drafter in bundle.drafters.items():
        session = OnnxSession(folder / f"{role.folder}.onnx")
        drafters[role] = graph_drafter(plain_drafter, session, recipe.limits.page_size)
        errors[role.folder] = shadow(drafters[role], plain_drafter, role.folder)
    tree, runner = recipe.tree, ModelRunner(target, drafters, block_size=recipe.tree.depth)
    equal = {}
    for name in trees_of(drafters) or ["off"]:
        policy = make_policy(name, block_size=tree.block_size, branches=tree.branches, row_budget=tree.row_budget)
        answers = [sequence.answer for sequence in Engine(runner, policy, Limits.of(recipe.limits)).generate(requests)]
        equal[name] = sum(answer == expected for answer, expected in zip(answers, plain, strict=True))
    figures: dict[str, Any] = {"prompts": len(requests), "equal_to_plain_decoding": equal}
    for which, stats in errors.items():
        relative = stats.relative()
        figures[which] = {output: float(f"{error:.2g}") for output, error in relative.items()}
        if recipe.fp8 is None and max(relative.values()) > _BOUND[recipe.precision]:
            raise BuildError(
                f"The outputs of the graph of {which} differ from the model's.",
                where=folder / f"{which}.onnx",
                found=figures[which],
                expected=f"errors of at most {_BOUND[recipe.precision]} of an output's largest",
                fix="this is a bug in d2sd: report it",
            )
    return {"graphs": figures}


@dataclass(slots=True)
class ErrorStats:
    """Errors of one model's outputs, by output name."""

    of: str  # the model
    largest: dict[str, float] = field(default_factory=dict)  # |graph - model|
    scale: dict[str, float] = field(default_factory=dict)  # |model|, its largest

    def compare(self, name: str, output: Tensor, expected: Tensor) -> None:
        """Record the largest difference. Raises `BuildError` if only the model's numbers are finite.

        A target without drafters has no features: there is nothing to compare.
        """
        if not expected.numel():
            return
        if expected.isfinite().all() and not output.isfinite().all():
            raise BuildError(
                f"The outputs of the graph of {self.of} are not finite, and the model's are.",
                where=name,
                fix="this is a bug in d2sd: report it",
            )
        error = (output.float() - expected.float()).abs().max().item()
        self.largest[name] = max(self.largest.get(name, 0.0), error)
        self.scale[name] = max(self.scale.get(name, 0.0), expected.float().abs().max().item())

    def relative(self) -> dict[str, float]:
        """Largest difference as a share of the output's largest number; 0 where there is none."""
        return {name: error and error / max(self.scale[name], 1e-30) for name, error in self.largest.items()}


class ShadowDecoder(GraphDecoder):
    """Serves the outputs of a target's graph and compares them with the target's."""

    def __init__(self, target: Decoder, aux_layer_ids: tuple[int, ...], session: Session) -> None:
        super().__init__(target, aux_layer_ids, session)
        self._plain, self.errors = target, ErrorStats("target")

    def forward(
        self, tokens: Tensor, rows: Rows | Chunks, pool: KVPool, aux_layer_ids: tuple[int, ...] = ()
    ) -> DecoderOutput:
        out = super().forward(tokens, rows, pool, aux_layer_ids)
        plain = self._plain(tokens, rows, pool, self._aux_layer_ids)
        real = _real(rows)
        self.errors.compare("hidden", out.hidden[real], plain.hidden[real])
        self.errors.compare("features", out.features[real], plain.features[real])
        self.errors.compare("k", out.k[:, real], plain.k[:, real])
        self.errors.compare("v", out.v[:, real], plain.v[:, real])
        return out


def shadow(graph: DraftModel, plain: DraftModel, name: str) -> ErrorStats:
    """The errors of a drafter's graph, whose outputs are compared with the drafter's from now on."""
    errors, draft, keys_values = ErrorStats(name), graph.draft, graph.context_keys_values

    def compared(x: Tensor, rows: Rows, pool: KVPool) -> Tensor:
        hidden, real = draft(x, rows, pool), _real(rows)
        errors.compare("hidden", hidden[real], plain.draft(x, rows, pool)[real])
        return hidden

    def compared_context(features: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        outputs, expected = keys_values(features, positions), plain.context_keys_values(features, positions)
        for kind, ours, theirs in zip("kv", outputs, expected, strict=True):
            errors.compare(kind, ours, theirs)
        return outputs

    graph.draft, graph.context_keys_values = compared, compared_context  # type: ignore[method-assign]
    return errors


def _real(rows: Rows | Chunks) -> Tensor:
    """[B, T] bool: True for real requests, as all chunks are.

    Padding requests use scratch page 0; their half-precision values diverge arbitrarily and are not compared.
    """
    if isinstance(rows, Chunks):
        return torch.ones_like(rows.positions, dtype=torch.bool)
    return (rows.where.pages[:, :1] != 0).expand_as(rows.positions)
