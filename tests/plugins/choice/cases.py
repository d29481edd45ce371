"""Kernels from logits to tokens: drafts of every width, and the target's choice, greedy and sampled."""

from __future__ import annotations

from functools import partial
from typing import Any

from d2sd.plugins.choice import candidates, choose
from d2sd.plugins.choice.reference import FILTERS, SamplingTensors
from d2sd.plugins.choice.triton.drafts import pool_kernel, segments_kernel
from d2sd.plugins.choice.triton.filters import filtered_kernel
from d2sd.plugins.choice.triton.launch import SEGMENT
from d2sd.plugins.choice.triton.tokens import combine_kernel, scores_kernel
from d2sd.plugins.trees import Branches
from tests.plugins.cases import TYPES, Check, Kernel, some

VOCABULARIES = (151_936, 32_000)


def sampling(filters: bool = False, *, sampled: bool = True) -> SamplingTensors:
    """One request, which samples; with all filters at once."""
    one, whole = some("fp32", 1), some("i64", 1)
    return SamplingTensors(
        temperature=one,
        top_p=one,
        top_k=whole,
        min_p=one,
        filtered=some("i32", 1),
        seed=whole,
        any_sampled=sampled,
        used=FILTERS if filters else (),
    )


def draft(vocab: int, width: int, sampled: bool, branches: bool = False) -> None:
    logits, context, kept = some("bf16", 1, 7, 15, vocab), some("i64", 1), some("i64", 1, 7)
    behind = Branches(some("i64", 1, 7, 15), kept, kept) if branches else None
    candidates.triton(logits, context, sampling(sampled, sampled=sampled), width, some("i64", vocab), behind)


def choice(vocab: int, sampled: SamplingTensors) -> None:
    choose.triton(some("bf16", 1, 64, vocab), some("i64", 1), some("i64", 1, 64), sampled)


def filter_touched(values: dict[str, Any], _: int) -> tuple[dict[str, int], int]:
    """The segments of a kept set of 40 tokens, each in one of its own."""
    rows, logits = values["maxima"].shape[0], values["logits"]
    looked = min(40 * SEGMENT, values["vocab"])
    return {
        "logits": rows * looked * logits.element_size(),
        "segments": rows * 40 * values["segments"].element_size(),
        "entries": rows * 40 * values["entries"].element_size(),
    }, 0


def pool_touched(values: dict[str, Any], _: int) -> tuple[dict[str, int], int]:
    """The segments of the best maxima, and the ids of as many tokens."""
    rows, logits, ids = values["maxima"].shape[0], values["logits"], values["ids"]
    looked = min(values["POOLP"] * values["SEG"], values["vocab"])
    of_candidates = rows * values["POOLP"]
    if values["rejected"] is not None:
        of_candidates += values["rejected"].numel() * looked  # in the slot that one is missing in
    return {
        "logits": rows * looked * logits.element_size(),
        "ids": 0 if ids is None else of_candidates * ids.element_size(),
    }, 0


DRAFTS = {
    f"{width} of {vocab}{' sampled' * sampled}": partial(draft, vocab, width, sampled)
    for vocab in VOCABULARIES
    for width, sampled in ((1, False), (16, False), (16, True))
}
DRAFTS |= {
    f"{width} of {vocab} behind branches": partial(draft, vocab, width, False, branches=True)
    for vocab in VOCABULARIES
    for width in (1, 16)
}
GREEDY = {f"{vocab}": partial(choice, vocab, sampling(sampled=False)) for vocab in VOCABULARIES}
SAMPLED = {f"{vocab}": partial(choice, vocab, sampling()) for vocab in VOCABULARIES}
FILTERED = {f"{vocab}": partial(choice, vocab, sampling(True)) for vocab in VOCABULARIES}
KERNELS = (
    Kernel(
        segments_kernel,
        ("maxima", "partial"),
        {f"segments {name}": run for name, run in DRAFTS.items()},
        streamed=("logits",),
    ),
    Kernel(
        pool_kernel,
        ("tokens", "logprob", "segments", "entries"),
        {f"pool {name}": run for name, run in DRAFTS.items()},
        reads_back=("segments", "entries"),
        touched=pool_touched,
        streamed=("logits",),
    ),
    Kernel(
        scores_kernel,
        ("partial", "maxima", "sums"),
        {f"scores of {name}": run for name, run in GREEDY.items()}
        | {f"scores of {name} sampled": run for name, run in SAMPLED.items()}
        | {f"scores of {name} filtered": run for name, run in FILTERED.items()},
        streamed=("logits",),
    ),
    Kernel(
        filtered_kernel,
        ("chosen", "threshold", "segments", "entries"),
        {f"filters of {name}": run for name, run in FILTERED.items()},
        reads_back=("segments", "entries"),
        touched=filter_touched,
        streamed=("logits",),
    ),
    Kernel(combine_kernel, ("chosen",), {f"combine {name}": run for name, run in GREEDY.items()}),
)
CHECKS = {
    "noise": Check("noise", "choices.test_noise_keeps_its_digits_at_both_ends", barriers=False),
    "choice": Check("scores combine", "choices.test_choice", (3, 63, "SAMPLED")),
    "filters": Check("scores filtered", "filters.test_the_choice_is_that_of_loops_over_the_tokens", ((0, 3),), False),
    "rejected": Check("segments pool", "candidates.test_rejected_tokens", (63, TYPES["bf16"], "SAMPLED"), False),
    "drafts": Check("segments pool", "choices.test_candidates", (2, 63, 5, "GREEDY")),
}
