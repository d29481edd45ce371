"""A day of requests to an engine on fake CUDA tensors: which kernels are asked for before the port opens, and after.

    python -m tests.runtime.fake_day FOLDER SEED POLICY KIND ...

KIND is one of `KINDS` of models. Prints a JSON line for each policy and kind: how many specialisations of Triton's
kernels the warm-up asks for, and those that only requests ask for, which would be compiled while they wait. A
specialisation is what Triton makes of a launch's arguments (`specialisations.py`). FOLDER has the device guard of
tools/cuda/guard.py, which other tests' processes must not load.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from functools import partialmethod
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

from triton.runtime.jit import JITFunction  # type: ignore[import-untyped]

from d2sd.policies import PolicyName
from d2sd.runtime import model_runner
from d2sd.runtime.decode import StepResult
from d2sd.runtime.engine import Engine
from d2sd.runtime.grammar.step import NoGrammar, StepGrammar
from d2sd.runtime.request import Limits, Request
from d2sd.runtime.sampling_params import SamplingParams
from tests.cuda import models
from tests.runtime.soak import Thirds
from tests.runtime.specialisations import Specialisations, launched
from tools.cuda import guard
from tools.cuda.fake import Captures, Watch, fake_gpu, unpack

#: Kinds of models, as arguments of `models.runner`.
KINDS: dict[str, dict[str, Any]] = {
    "dense": {},
    "fp8": {"fp8": True},
    "exact": {"exact": True},
    "exact windows": {"exact": True, "windows": (40, None)},
    "windows": {"windows": (40, None), "sinks": True},
}
LIMITS = Limits(max_batch=6, max_context=1024, page_size=16, prefill_chunk=128)


def request(dice: random.Random, started: list[tuple[int, ...]]) -> Request:
    """Prompts of any length, some of which begin alike; parameters of every kind that the engine has."""
    length = dice.choice((1, 2, 5, dice.randrange(1, 40), dice.randrange(1, 200), dice.randrange(1, 900)))
    prompt = tuple(dice.randrange(models.VOCABULARY - 1) for _ in range(length))
    if started and dice.random() < 0.3:
        prompt = (dice.choice(started) + prompt)[:900]
    started.append(prompt)
    sampling: dict[str, Any] = {"temperature": dice.choice((0.0, 0.0, 1.0, 0.7)), "seed": dice.randrange(1000)}
    if dice.random() < 0.3:
        sampling |= dice.choice(({"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.1}, {"top_p": 0.5, "top_k": 3}))
    if dice.random() < 0.3:
        sampling |= dice.choice(
            (
                {"repetition_penalty": 1.2},
                {"presence_penalty": 0.5},
                {"logit_bias": {5: 2.0}},
                {"bad_words_token_ids": ((7, 8), (9,))},
                {"logprobs": dice.randrange(5)},
                {"min_tokens": 3},
            )
        )
    if dice.random() < 0.2:
        sampling["prompt_logprobs"] = dice.randrange(4)
    grammar = Thirds() if dice.random() < 0.1 else None
    return Request(prompt, dice.randrange(3, 60), SamplingParams(**sampling), grammar=grammar, client=dice.choice("ab"))


def day(engine: Engine, dice: random.Random, steps: int) -> Counter[str]:
    """Serve requests that arrive now and then; returns what happened."""
    started: list[tuple[int, ...]] = []
    seen: Counter[str] = Counter()
    for _ in range(steps):
        if dice.random() < 0.35:
            for _ in range(dice.choice((1, 1, 1, 2, 4))):
                engine.submit(request(dice, started))
        if engine.scheduler.running and dice.random() < 0.05:
            engine.cancel(dice.choice(engine.scheduler.running))
        engine.step()
        seen[f"batch {len(engine.scheduler.running)}"] += 1
    stats = engine.stats
    return seen + Counter(steps=stats.steps, prefilled=stats.prefill_tokens, hits=stats.prefix_hit_tokens)


def main(folder: str, seed: str, *runs: str) -> None:
    guard.load(Path(folder))
    for name, kind in zip(runs[::2], runs[1::2], strict=True):
        asked = Specialisations()
        with (
            fake_gpu(Watch()),
            patch.object(model_runner, "CudaGraphs", Captures),
            patch.object(StepResult, "unpack", unpack),
            patch.object(StepGrammar, "of", lambda sequences: NoGrammar()),
            patch.object(JITFunction, "run", partialmethod(launched, asked)),
        ):
            policy = models.policy_of(cast("PolicyName", name))
            runner = models.runner(2, 1, roles=policy.drafters, **({"fp8": False} | KINDS[kind]))
            engine = Engine(runner, policy, LIMITS)
            with Watch():  # has the one operator without a fake form
                engine.warm_up()
                asked.phase = "day"
                seen = day(engine, random.Random(seed), 60)
        counted = {"warm": len(asked.found["warm"]), "late": asked.late, "seen": seen}
        print(json.dumps({"policy": name, "kind": kind} | counted), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
