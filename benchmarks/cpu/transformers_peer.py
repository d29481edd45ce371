"""transformers as a contestant: greedy `generate`, alone, with prompt lookup, and over static batches."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.cpu.contestant import Key, Limits, Passed, Tokens, Weights, ended

DTYPES: dict[Weights, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
#: Tokens that prompt lookup drafts: what its documentation recommends.
LOOKUP = 10


class Transformers:
    """One model and one way to call `generate`."""

    def __init__(self, model: Any, key: Key, limits: Limits, **options: Any) -> None:
        self.key, self._model, self._limits, self._options = key, model, limits, options

    def answer(self, prompts: Sequence[Tokens]) -> Passed:
        """Answer them in batches; a batch lasts as long as its longest answer."""
        answers: list[Tokens] = []
        seconds = prefill = 0.0
        steps = 0
        for first in range(0, len(prompts), self._limits.in_flight):
            found, times = self._generate(prompts[first : first + self._limits.in_flight])
            answers += found
            seconds += times[-1]
            prefill += times[0]
            steps += len(times) - 2
        return Passed(seconds, prefill, steps, answers)

    def _generate(self, prompts: Sequence[Tokens]) -> tuple[list[Tokens], list[float]]:
        """Answers, and seconds until each pass of the model had been made and until the end."""
        width, stops = max(map(len, prompts)), sorted(self._limits.stop_tokens)
        ids = torch.tensor([[stops[0]] * (width - len(one)) + one for one in prompts])
        mask = torch.tensor([[0] * (width - len(one)) + [1] * len(one) for one in prompts])
        times: list[float] = []
        start = time.perf_counter()
        hook = self._model.register_forward_hook(lambda *_: times.append(time.perf_counter() - start))
        try:
            found = self._model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=self._limits.max_new_tokens,
                eos_token_id=stops,
                pad_token_id=stops[0],
                **self._options,
            )
            times.append(time.perf_counter() - start)
        finally:
            hook.remove()
        return [ended(row, stops) for row in found[:, width:].tolist()], times


def transformers_peers(target: Path, limits: Limits) -> Iterator[Transformers]:
    """Contestants of the target's folder, in each precision. Prompt lookup cannot answer a batch."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    alone = limits.in_flight == 1
    for weights, dtype in DTYPES.items():
        model = AutoModelForCausalLM.from_pretrained(target, dtype=dtype, local_files_only=True).eval()
        mode = "generate" if alone else f"static batches of {limits.in_flight}"
        yield Transformers(model, Key("transformers", mode, weights, True), limits)
        if alone:
            key = Key("transformers", "prompt lookup", weights, False)
            yield Transformers(model, key, limits, prompt_lookup_num_tokens=LOOKUP)
