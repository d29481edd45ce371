"""Captured decode steps serve what steps without a graph serve, on tiny random models whose drafters are often right.

Every case serves the same requests three times: on the CPU, on the device operator by operator, and on the device as
CUDA graphs. They join and leave a running batch, greedy, sampled and filtered, and policies take turns, so that
drafters wait and catch up. In fp32 all tokens must be equal.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import cache, partial
from typing import Any, cast

import torch

from benchmarks.gpu.cases import Case, Note
from d2sd.modeling.decoder import Decoder
from d2sd.modeling.drafters.dflash import Drafter
from d2sd.modeling.drafters.flexdraft import FlexHead
from d2sd.policies import PolicyName
from d2sd.runtime.cuda_graphs.capture import Capture, CudaGraphs
from d2sd.runtime.engine import Engine
from d2sd.runtime.model_runner import ModelRunner
from d2sd.runtime.request import Limits, Request
from d2sd.runtime.sampling_params import SamplingParams
from d2sd.runtime.speculation.policy import Policy, make_policy
from tests.runtime.cheating import Knowing
from tests.tiny import runner_of, tiny_decoder, tiny_drafter, tiny_flex

#: `flex` is `chain` of a FlexDraft head.
POLICIES = ("off", "lookup", "chain", "d2sd", "hybrid", "flex")
BLOCK, BRANCHES, NODES = 5, 3, 14
LIMITS = Limits(max_batch=4, max_context=128, page_size=16, prefill_chunk=32)
KINDS = (SamplingParams(), SamplingParams(1.0), SamplingParams(0.8, top_p=0.9, top_k=20))
#: Decode steps between two arrivals, and of one policy.
GAP, TURN = 3, 4
Texts = Mapping[int, Sequence[int]]


def cases() -> Iterator[Case]:
    for dtype in (torch.float32, torch.bfloat16):
        for policy in POLICIES:
            yield f"captured/{policy} {str(dtype).removeprefix('torch.')}", partial(served, policy, dtype)


def served(
    policy: str,
    dtype: torch.dtype,
    _: Note,
    device: str = "cuda",
    capture: Callable[[str], Capture] = CudaGraphs,
    requests: int = 12,
) -> dict[str, Any]:
    """Shares of requests with equal answers, graphs, and milliseconds of a step; raises where fp32 answers differ."""
    asked = requests_of(requests)
    texts = cpu_texts(asked)
    wanted = [texts[request.seed][len(request.prompt) :] for request in asked]
    of_head = policy == "flex"
    name = "chain" if of_head else cast("PolicyName", policy)
    eager, eager_ms = _serve(name, _runner(dtype, device, None, texts, of_head=of_head), asked)
    captured, captured_ms = _serve(name, _runner(dtype, device, capture(device), texts, of_head=of_head), asked)
    equal = {
        "equal_to_eager": _share(captured, eager),
        "eager_to_cpu": _share(eager, wanted),
        "captured_to_cpu": _share(captured, wanted),
    }
    if dtype == torch.float32:
        assert min(equal.values()) == 1, f"answers differ: {equal}"
    return equal | {"requests": requests, "eager_ms": eager_ms, "captured_ms": captured_ms}


def requests_of(count: int) -> list[Request]:
    """Prompts of 3 to 40 tokens; every third begins as the one before it, for the prefix cache."""
    draw = torch.Generator().manual_seed(count)
    found: list[Request] = []
    for index in range(count):
        length, answer = (int(torch.randint(low, high, (), generator=draw)) for low, high in ((3, 40), (10, 40)))
        prompt = tuple(torch.randint(64, (length,), generator=draw).tolist())
        if index % 3 == 2:
            prompt = (found[-1].prompt + prompt)[:40]
        found.append(Request(prompt, answer, KINDS[index % len(KINDS)].with_seed(index + 1)))
    return found


@cache
def models() -> tuple[Decoder, Drafter, Drafter, FlexHead]:
    target = tiny_decoder("qwen3", hidden=64, head_dim=16)
    first = tiny_drafter(target.config, block_size=BLOCK, layers=1)
    second = tiny_drafter(target.config, block_size=BLOCK, layers=1, role="variable_prefix", seed=2)
    return target, first, second, tiny_flex(target, block_size=BLOCK)


def cpu_texts(requests: Sequence[Request]) -> dict[int, list[int]]:
    """Prompt and answer of every request by plain decoding on the CPU, by seed."""
    engine = Engine(runner_of(deepcopy(models()[0]), block_size=BLOCK), _policy("off"), LIMITS)
    return {s.request.seed: s.tokens for s in engine.generate(requests)}


def _runner(
    dtype: torch.dtype, device: str, capture: Capture | None, texts: Texts, *, of_head: bool = False
) -> ModelRunner:
    target, first, second, head = deepcopy(models())
    for model in (target, first, second, head):
        model.to(device, dtype)
    runner = Knowing(target, head, None, texts) if of_head else Knowing(target, first, second, texts)
    runner.capture, runner.static_shapes = capture, True
    return runner


def _serve(policy: PolicyName, runner: ModelRunner, requests: Sequence[Request]) -> tuple[list[list[int]], float]:
    """Answers, and milliseconds of a step, prefill included, the second time that all are served."""
    engine = Engine(runner, _policy(policy), LIMITS)
    turns = [_policy(policy), _policy("off"), _policy("chain")]
    found = []
    for _ in range(2):  # kernels are compiled and graphs captured the first time
        waiting, sequences, steps, start = list(requests), [], 0, time.perf_counter()
        while waiting or engine.busy:
            if waiting and steps % GAP == 0:
                sequences.append(engine.submit(waiting.pop(0)))
            engine.policy = turns[steps // TURN % len(turns)]
            engine.step()
            steps += 1
        seconds = time.perf_counter() - start
        found.append([sequence.answer for sequence in sequences])
    # The second time the prefix cache has the prompts: products of other shapes round differently in bf16.
    if runner.target.embed_tokens.weight.dtype == torch.float32:
        assert found[0] == found[1], "the same engine gives other answers the second time"
    return found[1], 1000 * seconds / steps


def _policy(name: PolicyName) -> Policy:
    return make_policy(name, block_size=BLOCK, branches=BRANCHES, row_budget=NODES)


def _share(answers: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> float:
    return sum(list(a) == list(b) for a, b in zip(answers, others, strict=True)) / len(answers)
