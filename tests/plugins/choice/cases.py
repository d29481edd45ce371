"""Kernels from logits to tokens: drafts of every width, and the target's choice, greedy and sampled."""

from __future__ import annotations

from functools import partial
from typing import Any

from d2sd.plugins.choice.reference import SamplingTensors
from d2sd.plugins.choice.triton.drafts import pool_kernel, segments_kernel, threshold_kernel
from d2sd.plugins.choice.triton.launch import candidates_triton, choose_triton
from d2sd.plugins.choice.triton.tokens import combine_kernel, scores_kernel
from tests.plugins.cases import Check, Kernel, some

VOCABULARIES = (151_936, 32_000)
#: All filters at once.
SAMPLING = SamplingTensors(*(some(kind, 1) for kind in ("fp32", "fp32", "i64", "fp32", "i64")), *[True] * 4)  # type: ignore[arg-type]


def draft(vocab: int, pool: int, width: int, sampled: bool) -> None:
    logits, context = some("bf16", 1, 7, 15, vocab), some("i64", 1)
    candidates_triton(logits, context, width, pool, some("i64", vocab), SAMPLING if sampled else None)


def choose(vocab: int, sampled: bool) -> None:
    choose_triton(some("bf16", 1, 64, vocab), some("i64", 1), some("i64", 1, 64), SAMPLING if sampled else None)


def pool_touched(values: dict[str, Any], _: int) -> tuple[dict[str, int], int]:
    """The segments of the best maxima, and the ids of as many tokens."""
    rows, logits, ids = values["maxima"].shape[0], values["logits"], values["ids"]
    looked = min(values["POOLP"] * values["SEG"], values["vocab"])
    return {
        "logits": rows * looked * logits.element_size(),
        "ids": 0 if ids is None else rows * values["POOLP"] * ids.element_size(),
    }, 0


DRAFTS = {
    f"{width} of {vocab}{' sampled' * sampled}": partial(draft, vocab, pool, width, sampled)
    for vocab in VOCABULARIES
    for pool, width, sampled in ((1, 1, False), (16, 16, False), (64, 16, True))
}
GREEDY = {f"{vocab}": partial(choose, vocab, False) for vocab in VOCABULARIES}
SAMPLED = {f"{vocab}": partial(choose, vocab, True) for vocab in VOCABULARIES}
KERNELS = (
    Kernel(
        segments_kernel,
        ("maxima", "partial"),
        {f"segments {name}": run for name, run in DRAFTS.items()},
        streamed=("logits",),
    ),
    Kernel(
        pool_kernel,
        ("tokens", "logprob"),
        {f"pool {name}": run for name, run in DRAFTS.items()},
        touched=pool_touched,
        streamed=("logits",),
    ),
    Kernel(
        scores_kernel,
        ("partial",),
        {f"scores of {name}": run for name, run in GREEDY.items()}
        | {f"scores of {name} sampled": run for name, run in SAMPLED.items()},
        streamed=("logits",),
    ),
    Kernel(
        threshold_kernel,
        ("threshold",),
        {f"filters of {name}": run for name, run in SAMPLED.items()},
        streamed=("logits",),
    ),
    Kernel(combine_kernel, ("chosen",), {f"combine {name}": run for name, run in GREEDY.items()}),
)
CHECKS = {
    "noise": Check("noise", "choices.test_noise_keeps_its_digits_at_both_ends", barriers=False),
    "choice": Check("threshold scores combine", "choices.test_choice", (3, 63, "TOP")),
    "drafts": Check("segments pool", "choices.test_candidates", (2, 63, 5, "GREEDY")),
}
