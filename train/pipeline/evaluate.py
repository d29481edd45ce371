"""Evaluation of drafters: greedy generation from held-out prompts with the real runtime, counting accepted tokens."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import torch

from d2sd.bundle.load import Bundle
from d2sd.bundle.serving import make_engine
from d2sd.convert.checkpoint.flex import with_vocabulary
from d2sd.convert.checkpoint.weights import fill
from d2sd.modeling.decoder import Decoder
from d2sd.modeling.drafters.dflash import Drafter
from d2sd.modeling.drafters.flexdraft import FlexHead
from d2sd.policies import DrafterName, PolicyName
from d2sd.progress import Progress
from d2sd.recipe import Tree
from d2sd.runtime.observe import run_observed
from d2sd.runtime.request import Request
from d2sd.runtime.stats import reliability_bins
from d2sd.train.data.responses import Response
from d2sd.train.pipeline.evaluation import AcceptedLengths, Evaluation
from d2sd.train_recipe import TrainRecipe

#: Node budget of every tree; a chain or a tree of all branches may have fewer nodes.
_NODE_BUDGET = 64
#: By `DrafterRole`.
_DRAFTERS: tuple[DrafterName, ...] = ("first", "second", "flex")


class Evaluator:
    """Generates from the prompts of held-out responses."""

    def __init__(
        self, recipe: TrainRecipe, bundle: Bundle, held_out: Sequence[Response], device: str, progress: Progress
    ) -> None:
        """`bundle` holds the target used in training; it is not modified."""
        tree = Tree(policy="off", block_size=recipe.block_size, branches=recipe.block_size - 1)
        described = bundle.manifest.model_copy(update={"recipe": bundle.recipe.model_copy(update={"tree": tree})})
        self._bundle = replace(bundle, manifest=described)
        self.device, self._progress = device, progress
        new_tokens, stops = recipe.evaluation.max_new_tokens, frozenset(bundle.stop_token_ids)
        self.requests = {r.id: Request(tuple(r.prompt_ids), new_tokens, stop_tokens=stops) for r in held_out}
        self._evaluated = list(self.requests.items())[: recipe.evaluation.prompts]

    @property
    def prompts(self) -> list[str]:
        """Ids of the prompts that `evaluate` runs; `requests` has all held-out prompts."""
        return [name for name, _ in self._evaluated]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which drafters are served, equal to the target's."""
        return self._bundle.target.embed_tokens.weight.dtype

    def serving(
        self, first: Drafter | None = None, second: Drafter | None = None, flex: FlexHead | None = None
    ) -> Bundle:
        """The target with these drafters, which an engine may repack: pass copies of drafters in training."""
        if flex is not None:
            flex.join(self._bundle.target)  # whose layers no engine packs
        return replace(self._bundle, target=self._target, first=first, second=second, flex=flex)

    def evaluate(
        self, method: PolicyName, first: Drafter | None = None, second: Drafter | None = None,
        flex: FlexHead | None = None,
    ) -> Evaluation:  # fmt: skip
        """Generate from the prompts with the policy `method`, in one batch, and count accepted tokens."""
        batch = min(self._bundle.recipe.limits.max_batch, len(self._evaluated))
        engine = make_engine(
            self.serving(first, second, flex),
            policy=method,
            row_budget=_NODE_BUDGET,
            device=self.device,
            max_batch=batch,
        )
        engine.record_trace = True
        accepted = {engine.submit(request).id: (name, list[int]()) for name, request in self._evaluated}
        outcomes: dict[DrafterName, list[tuple[float, bool]]] = {}  # predicted acceptance, accepted
        with self._progress(f"evaluating {method}", len(self._evaluated)) as advance:
            for step in run_observed(engine, advance):
                accepted[step.sequence.id][1].append(step.accepted)
                for node in step.judged:
                    outcomes.setdefault(_DRAFTERS[node.drafter], []).append((node.prob, node.accepted))
        return Evaluation(
            method=method,
            rows=engine.policy.num_nodes,
            requests=[AcceptedLengths(id=name, accepted=lengths) for name, lengths in accepted.values()],
            calibration={drafter: reliability_bins(found) for drafter, found in outcomes.items()},
        )

    @cached_property
    def _target(self) -> Decoder:
        """The target to serve: a copy on CPU, where engines repack weights."""
        target = self._bundle.target
        return target if self.device.startswith("cuda") else copy.deepcopy(target)


def flex_as_written(
    head: FlexHead, vocabulary: tuple[int, ...] | None, dtype: torch.dtype = torch.bfloat16
) -> FlexHead:
    """The same of a FlexDraft head; it has not joined a target."""
    return with_vocabulary(head, vocabulary).to(torch.bfloat16).to(dtype)


def as_written(drafter: Drafter, vocabulary: tuple[int, ...] | None, dtype: torch.dtype = torch.bfloat16) -> Drafter:
    """A copy on the CPU with the draft vocabulary `vocabulary`, rounded to bf16 as drafters are on disk."""
    with torch.device("meta"):
        out = Drafter(replace(drafter.config, draft_vocabulary=vocabulary))
    fill(out, {k: v.detach().to("cpu", torch.bfloat16).to(dtype) for k, v in drafter.state_dict().items()})
    return out
