"""From a loaded bundle to a running engine: the place where recipe, converters and runtime meet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from d2sd.errors import BundleError, D2SDError
from d2sd.recipe import Policy

if TYPE_CHECKING:
    from d2sd.convert.bundle import Bundle
    from d2sd.runtime.engine import Engine
    from d2sd.runtime.request import Request, SamplingParams

#: Prompts of our own writing, for smoke tests and calibration.
OWN_PROMPTS = Path(__file__).parent.parent / "prompts.jsonl"


def make_engine(
    bundle: Bundle, *, policy: Policy | None = None, device: str = "cpu", max_batch: int | None = None
) -> Engine:
    """An engine over the bundle's models; raises BundleError if the policy needs a drafter it has not."""
    from d2sd.runtime.engine import Engine
    from d2sd.runtime.executor import TorchExecutor
    from d2sd.runtime.policy import make_policy
    from d2sd.runtime.request import Limits

    recipe = bundle.recipe
    chosen = make_policy(
        policy or recipe.tree.policy,
        block_size=recipe.tree.block_size, branches=recipe.tree.branches, row_budget=recipe.tree.row_budget,
    )  # fmt: skip
    drafters = [bundle.first, bundle.second][: chosen.drafters]
    if None in drafters:
        raise BundleError(
            f"the policy needs {chosen.drafters} drafters", where=bundle.path,
            found=f"{sum(d is not None for d in (bundle.first, bundle.second))}", fix="choose another with --policy",
        )  # fmt: skip
    models = [drafter.to(device) for drafter in drafters if drafter is not None]
    executor = TorchExecutor(bundle.target.to(device), *models, block_size=recipe.tree.block_size)
    limits = recipe.limits
    return Engine(
        executor,
        chosen,
        Limits(max_batch or limits.max_batch, limits.max_context, limits.page_size, limits.prefill_chunk),
        decode=lambda ids: bundle.tokenizer.decode(ids, skip_special_tokens=True),
    )


def chat_request(
    bundle: Bundle,
    prompt: str,
    sampling: SamplingParams,
    max_new_tokens: int,
    *,
    raw: bool = False,
    stop: tuple[str, ...] = (),
) -> Request:
    """One user turn in the target's chat template (or the bare text if `raw`), stopping at the target's stop tokens."""
    from d2sd.runtime.request import Request

    tokenizer = bundle.tokenizer
    if raw or not tokenizer.chat_template:
        ids = tokenizer(prompt).input_ids
    else:
        turns = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=True, return_dict=False)
    return Request(tuple(ids), max_new_tokens, sampling, frozenset(bundle.stop_token_ids), stop)


def read_prompts(path: Path) -> list[tuple[str, str]]:
    """(id, first user turn) of every line of a JSONL file of {id, turns}; raises D2SDError naming file and line."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise D2SDError("the prompts cannot be read", where=path, found=error) from None
    prompts = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            prompts.append((str(row["id"]), str(row["turns"][0])))
        except (ValueError, KeyError, TypeError, IndexError):
            raise D2SDError(
                "not a prompt", where=f"{path}:{number}", found=line[:80], expected='{"id": "…", "turns": ["…"]}'
            ) from None
    return prompts
