"""Evaluation of drafters: greedy generation from held-out prompts with the real runtime, counting accepted tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeVar, cast

import torch

from d2sd.bundle.load import Bundle
from d2sd.bundle.requests import make_request
from d2sd.bundle.serving import make_engine
from d2sd.convert.checkpoint.weights import fill
from d2sd.convert.kinds import KINDS
from d2sd.modeling.decoder import Decoder
from d2sd.modeling.drafters.interface import DraftModel
from d2sd.policies import DRAFTER_NAMES, DrafterName, DrafterRole, PolicyName
from d2sd.progress import Progress
from d2sd.recipe import Tree
from d2sd.runtime.evaluation import AcceptedLengths, Evaluation
from d2sd.runtime.observe import run_observed
from d2sd.runtime.sampling_params import SamplingParams
from d2sd.runtime.stats import reliability_bins
from d2sd.train.data.responses import Response
from d2sd.train.kinds import trained_kind
from d2sd.train_recipe import TrainRecipe

#: Node budget of every tree; a chain or a tree of all branches may have fewer nodes.
_NODE_BUDGET = 64

Model = TypeVar("Model", bound=DraftModel)


class Evaluator:
    """Generates from the prompts of held-out responses."""

    def __init__(
        self, recipe: TrainRecipe, bundle: Bundle, held_out: Sequence[Response], device: str, progress: Progress
    ) -> None:
        """`bundle` holds the target used in training."""
        tree = Tree(policy="off", block_size=recipe.block_size, branches=recipe.block_size - 1)
        described = bundle.manifest.model_copy(update={"recipe": bundle.recipe.model_copy(update={"tree": tree})})
        self._bundle = replace(bundle, manifest=described)
        self.device, self._progress = device, progress
        greedy, length = SamplingParams(), recipe.evaluation.max_new_tokens
        self.requests = {r.id: make_request(bundle, r.prompt_ids, greedy, length) for r in held_out}
        self._evaluated = list(self.requests.items())[: recipe.evaluation.prompts]

    @property
    def prompts(self) -> list[str]:
        """Ids of the prompts that `evaluate` runs; `requests` has all held-out prompts."""
        return [name for name, _ in self._evaluated]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which drafters are served, equal to the target's."""
        return self._bundle.target.embed_tokens.weight.dtype

    def serving(self, drafters: Mapping[DrafterRole, DraftModel]) -> Bundle:
        """The target, prepared for inference, with these drafters."""
        for drafter in drafters.values():
            KINDS[drafter.config.kind].attach(drafter, self._bundle.target)
        return replace(self._bundle, target=self._target, drafters=dict(drafters))

    def evaluate(self, method: PolicyName, drafters: Mapping[DrafterRole, DraftModel]) -> Evaluation:
        """Generate from the prompts with the policy `method`, in one batch, and count accepted tokens."""
        batch = min(self._bundle.recipe.limits.max_batch, len(self._evaluated))
        engine = make_engine(
            self.serving(drafters),
            policy=method,
            row_budget=_NODE_BUDGET,
            device=self.device,
            max_batch=batch,
            lookup=False,
        )
        engine.record_trace = True
        accepted = {engine.submit(request).id: (name, list[int]()) for name, request in self._evaluated}
        outcomes: dict[DrafterName, list[tuple[float, bool]]] = {}  # predicted acceptance, accepted
        with self._progress(f"evaluating {method}", len(self._evaluated)) as advance:
            for step in run_observed(engine, advance):
                accepted[step.sequence.id][1].append(step.accepted)
                for node in step.judged:
                    outcomes.setdefault(DRAFTER_NAMES[node.drafter], []).append((node.prob, node.accepted))
        return Evaluation(
            method=method,
            rows=engine.policy.num_nodes,
            requests=[AcceptedLengths(id=name, accepted=lengths) for name, lengths in accepted.values()],
            calibration={drafter: reliability_bins(pairs) for drafter, pairs in outcomes.items()},
        )

    @cached_property
    def _target(self) -> Decoder:
        """The target that all engines share."""
        return self._bundle.serving((), self.device).target


def as_written(drafter: Model, vocabulary: tuple[int, ...] | None, dtype: torch.dtype = torch.bfloat16) -> Model:
    """A copy on the CPU with the draft vocabulary `vocabulary`, rounded to bf16 as drafters are on disk; it is not
    attached to a target.
    """
    config = replace(cast("Any", drafter.config), draft_vocabulary=vocabulary)
    with torch.device("meta"):
        out = type(drafter)(config)
    tensors = {
        name: tensor.detach().to("cpu", torch.bfloat16).to(dtype) for name, tensor in drafter.state_dict().items()
    }
    if vocabulary is not None:
        tensors |= {name: tensors[name][list(vocabulary)] for name in trained_kind(drafter.config.kind).token_rows}
    fill(out, tensors)
    return out
