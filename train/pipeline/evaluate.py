"""What drafters are worth: the real runtime answers held-out prompts with them, greedily, and counts."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from d2sd.bench import metrics
from d2sd.bench.measure import measure_cell
from d2sd.bench.result import Cell, Key
from d2sd.convert.bundle.load import Bundle
from d2sd.convert.bundle.serving import make_engine
from d2sd.convert.checkpoint.weights import fill
from d2sd.modeling.decoder import Decoder
from d2sd.modeling.drafter import Drafter
from d2sd.policies import PolicyName
from d2sd.progress import Progress
from d2sd.recipe import Tree
from d2sd.runtime.request import Request
from d2sd.train.data.responses import Answer
from d2sd.train.pipeline.log import calibration_errors
from d2sd.train_recipe import TrainRecipe

#: Of every tree: a chain, or one with all branches, takes what it needs of it.
_ROWS = 64


class Evaluator:
    """Asks the prompts of held-out answers."""

    def __init__(
        self, recipe: TrainRecipe, bundle: Bundle, held_out: Sequence[Answer], device: str, progress: Progress
    ) -> None:
        """`bundle` holds the target that trains drafters; it is left as it is."""
        tree = Tree(policy="off", block_size=recipe.drafter.block_size, branches=recipe.drafter.block_size - 1)
        described = bundle.manifest.model_copy(update={"recipe": bundle.recipe.model_copy(update={"tree": tree})})
        self._bundle = replace(bundle, manifest=described)
        self.device, self._progress = device, progress
        new_tokens, stops = recipe.evaluation.max_new_tokens, frozenset(bundle.stop_token_ids)
        self.requests = {a.id: Request(tuple(a.prompt_ids), new_tokens, stop_tokens=stops) for a in held_out}
        self._asked = list(self.requests.items())[: recipe.evaluation.prompts]

    @property
    def prompts(self) -> list[str]:
        """Ids of what `cell` asks; `requests` are all."""
        return [name for name, _ in self._asked]

    @property
    def dtype(self) -> torch.dtype:
        """What drafters are served in: the target's."""
        return self._bundle.target.embed_tokens.weight.dtype

    def serving(self, first: Drafter, second: Drafter | None = None) -> Bundle:
        """The target with these drafters, which an engine may repack: they are not those that train."""
        return replace(self._bundle, target=self._target, first=first, second=second)

    def cell(self, method: PolicyName, first: Drafter, second: Drafter | None = None) -> Cell:
        """Answer the prompts with `method`, in flight, and count."""
        flight = min(self._bundle.recipe.limits.max_batch, len(self._asked))
        engine = make_engine(
            self.serving(first, second), policy=method, row_budget=_ROWS, device=self.device, max_batch=flight
        )
        key = Key(method, engine.policy.num_nodes, "held out", 0.0, flight)
        with self._progress(f"evaluating {method}", len(self._asked)) as advance:
            return measure_cell(engine, key, self._asked, None, _not_asked, advance)[0]

    @cached_property
    def _target(self) -> Decoder:
        """On a CPU engines repack what they run, so there the one that trains is copied; a GPU's memory is spared."""
        target = self._bundle.target
        return target if self.device.startswith("cuda") else copy.deepcopy(target)


def written(drafter: Drafter, vocabulary: tuple[int, ...] | None, dtype: torch.dtype = torch.bfloat16) -> Drafter:
    """A copy on the CPU, rounded to bf16 as drafters are written, and with the vocabulary that it drafts from."""
    with torch.device("meta"):
        out = Drafter(replace(drafter.config, draft_vocabulary=vocabulary))
    fill(out, {k: v.detach().to("cpu", torch.bfloat16).to(dtype) for k, v in drafter.state_dict().items()})
    return out


def figures(cell: Cell) -> dict[str, Any]:
    """What an evaluation says of a method, as JSON values; equal drafters give equal figures."""
    return {
        "rows": cell.rows,
        "tau": round(metrics.tau(cell), 4),
        "joint acceptance": [round(share, 4) for share in metrics.joint_acceptance(cell)],
        "conditional acceptance": [round(share, 4) for share in metrics.conditional_acceptance(cell)],
        "calibration error": {name: round(error, 4) for name, error in calibration_errors(cell).items()},
    }


def _not_asked(request: Request) -> float:
    raise AssertionError("nothing is compared with plain decoding here")
