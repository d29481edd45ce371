"""Runs every task on every bundle, by plain decoding and with speculation, and compares the answers."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from d2sd.bench.accuracy.harness import require_lm_eval, run_task
from d2sd.bench.accuracy.result import Accuracy, Metric, Outcome, count_different
from d2sd.bench.accuracy.scoring import Scorer
from d2sd.bench.accuracy.tasks import TaskName, documents
from d2sd.bench.provenance import provenance
from d2sd.bundle.load import load_bundle
from d2sd.bundle.serving import make_engine
from d2sd.io import check_writable, sha256
from d2sd.manifest import load_manifest
from d2sd.progress import Progress, silent

if TYPE_CHECKING:
    from d2sd.bundle.backends import BackendName
    from d2sd.bundle.load import Bundle
    from d2sd.recipe import Policy
    from d2sd.runtime.engine import Engine


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What to evaluate: the first bundle is the reference of the others."""

    bundles: Sequence[Path]
    tasks: Sequence[TaskName]
    data: Path  # folder of the prompt sets
    limit: int | None = None  # documents of each task; None: all
    policy: Policy | None = None  # of speculation; None: each bundle's own
    chat: bool = False  # whether prompts go through the chat template
    max_new_tokens: int = 256
    device: str = "cpu"
    backend: BackendName = "torch"

    def run(self, out: Path, progress: Progress = silent) -> Accuracy:
        """Evaluate, and write the result to `out`.

        Raises D2SDError before anything runs if lm-eval, a bundle or the data is missing.
        """
        require_lm_eval()
        for path in self.bundles:
            load_manifest(path)
        docs = documents(self.data, self.tasks)
        out.parent.mkdir(parents=True, exist_ok=True)
        check_writable(out)
        outcomes: list[Outcome] = []
        for path in self.bundles:
            bundle = load_bundle(path, progress=progress)
            plain: list[Outcome] = []
            for policy in dict.fromkeys(("off", self.policy or bundle.recipe.tree.policy)):
                engine = make_engine(bundle, policy=policy, device=self.device, backend=self.backend)
                found = [self._outcome(bundle, engine, policy, task, docs, progress) for task in self.tasks]
                del engine  # its K/V pools, before the next engine's
                gc.collect()
                outcomes += [_compared(one, plain, outcomes) for one in found]
                plain = plain or found
        made_by = provenance(
            {str(path): sha256(path / "manifest.json") for path in self.bundles}, self.device, self.backend
        )
        versions = made_by.versions | {"lm_eval": version("lm_eval")}
        result = Accuracy(
            provenance=made_by.model_copy(update={"versions": versions}), limit=self.limit, chat_template=self.chat,
            max_new_tokens=self.max_new_tokens, outcomes=outcomes,
        )  # fmt: skip
        result.save(out)
        return result

    def _outcome(
        self,
        bundle: Bundle,
        engine: Engine,
        policy: Policy,
        task: TaskName,
        docs: Sequence[dict[str, Any]],
        progress: Progress,
    ) -> Outcome:
        scorer = Scorer(bundle, engine, max_new_tokens=self.max_new_tokens, chat=self.chat, progress=progress)
        metrics = run_task(scorer, task, docs, self.limit)
        usage, recipe = scorer.usage, bundle.recipe
        return Outcome(
            bundle=bundle.path.name,
            precision=recipe.precision if recipe.fp8 is None else "fp8",
            policy=policy,
            task=task,
            metrics={name: Metric(value=value, stderr=error) for name, (value, error) in metrics.items()},
            answers=usage.answers,
            differ=None,
            differ_from_first=None,
            truncated=usage.truncated,
            seconds=usage.seconds,
            tokens=usage.generated or usage.scored,
            accepted_length=usage.stats.tau if usage.generated else None,
        )


def _compared(outcome: Outcome, *references: Sequence[Outcome]) -> Outcome:
    """The outcome, with how many answers differ from the first of the same task in each of the two references."""
    differ = [
        next((count_different(outcome.answers, one.answers) for one in reference if one.task == outcome.task), None)
        for reference in references
    ]
    return outcome.model_copy(update={"differ": differ[0], "differ_from_first": differ[1]})
