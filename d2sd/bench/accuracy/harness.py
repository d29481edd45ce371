"""lm-eval around the scorer: its model class, and one task from documents to metrics."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from d2sd.bench.accuracy.tasks import METRICS, TaskName, config
from d2sd.extras import require

if TYPE_CHECKING:
    from d2sd.bench.accuracy.scoring import Scorer

#: Resamplings for the standard errors of perplexities.
_BOOTSTRAP = 1000


def require_lm_eval() -> None:
    """Raise D2SDError if lm-eval is not installed; it never uses the network."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when `datasets` is imported; the documents are in memory
    require("eval", ("lm_eval",), "d2sd eval")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns about settings that are meant


def run_task(
    scorer: Scorer, task: TaskName, documents: Sequence[dict[str, Any]], limit: int | None
) -> dict[str, tuple[float, float | None]]:
    """Metric -> (value, standard error or None) of the first `limit` documents."""
    import lm_eval
    from datasets import Dataset
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.evaluator import evaluate
    from pyarrow import Table

    # The fingerprint names a cache entry that is never used; datasets would compute it with dill.
    data = {"test": Dataset(Table.from_pylist(list(documents)), fingerprint=task)}
    own = config(task, Path(lm_eval.__file__).parent / "tasks")
    made = ConfigurableTask(
        config=own | {"task": task, "test_split": "test", "metadata": None, "custom_dataset": lambda **_: data}
    )
    found: dict[str, Any] = evaluate(
        language_model(scorer), {task: made}, limit=limit, bootstrap_iters=_BOOTSTRAP, log_samples=False,
        apply_chat_template=scorer.chat, fewshot_as_multiturn=scorer.chat,
    )["results"][task]  # fmt: skip
    return {
        name: (float(found[key]), _error(found.get(key.replace(",", "_stderr,"))))
        for key, name in METRICS[task].items()
    }


def language_model(scorer: Scorer) -> Any:
    """lm-eval's LM over the scorer; lm-eval encodes contexts with their continuations, and cuts long texts."""
    from lm_eval.api.model import TemplateLM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    class Model(TemplateLM):  # type: ignore[misc]  # lm-eval is optional: no types
        tokenizer = scorer.tokenizer
        tokenizer_name = str(scorer.tokenizer.name_or_path)

        @property
        def eot_token_id(self) -> int:
            token: int = scorer.tokenizer.eos_token_id
            return token

        @property
        def prefix_token_id(self) -> int:
            token: int | None = scorer.tokenizer.bos_token_id
            return self.eot_token_id if token is None else token

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            return scorer.encode(string, add_special_tokens)

        def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
            return scorer.render(chat_history, add_generation_prompt)

        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
            return scorer.generate([request.args for request in requests])

        def _loglikelihood_tokens(
            self, requests: list[tuple[Any, list[int], list[int]]], **_: Any
        ) -> list[tuple[float, bool]]:
            return scorer.score([(context, continuation) for _, context, continuation in requests])

        def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
            windows = [
                [
                    make_disjoint_window(window)
                    for window in get_rolling_token_windows(
                        scorer.encode(request.args[0], False), self.prefix_token_id, scorer.max_prompt - 1, 1
                    )
                ]
                for request in requests
            ]
            scores = iter(scorer.score([pair for pairs in windows for pair in pairs]))
            return [sum(next(scores)[0] for _ in pairs) for pairs in windows]

    return Model()


def _error(value: Any) -> float | None:
    """lm-eval writes "N/A" where a metric has no standard error."""
    return float(value) if isinstance(value, (int, float)) else None
