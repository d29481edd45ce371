"""Models, requests and ways of running them that the engine's tests share."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from copy import deepcopy
from functools import cache

import torch
from hypothesis import settings
from torch import Tensor

from d2sd.modeling.decoder import Decoder
from d2sd.modeling.drafters.dflash import Drafter
from d2sd.modeling.drafters.flexdraft import FlexHead
from d2sd.modeling.kv_pool import KVPool
from d2sd.policies import PolicyName
from d2sd.runtime.engine import Engine
from d2sd.runtime.model_runner import ModelRunner
from d2sd.runtime.request import Limits, Request
from d2sd.runtime.sampling.sample import Sampling, token_scores
from d2sd.runtime.sampling_params import SamplingParams
from d2sd.runtime.sequence import Output, Sequence
from d2sd.runtime.speculation.calibration import Calibration
from d2sd.runtime.speculation.policy import make_policy
from d2sd.runtime.text import Decode
from tests.runtime.cheating import CheatingRunner
from tests.runtime.oracle import plain_text
from tests.tiny import runner_of, tiny_decoder, tiny_drafter, tiny_flex

BLOCK, BRANCHES, BUDGET = 5, 3, 14

#: The same examples on every machine, and no database beside the sources.
STEADY = settings(deadline=None, derandomize=True, database=None, max_examples=100)

GREEDY = SamplingParams(seed=1)
_KINDS = (
    GREEDY,
    SamplingParams(temperature=0.7, top_p=0.95, seed=2),
    SamplingParams(temperature=1.0, seed=3),
    SamplingParams(temperature=1.0, top_k=5, seed=2**63 + 4),
    SamplingParams(temperature=0.9, top_k=20, top_p=0.8, seed=2**64 - 5),
)


@cache
def models() -> tuple[Decoder, Drafter, Drafter, FlexHead]:
    """As they were made, for the oracle; executors repack the layers of what they are given, so they get `copies`."""
    target = tiny_decoder("qwen3", layers=2, head_dim=16)  # which the compiled kernels take
    first = tiny_drafter(target.config, block_size=BLOCK, layers=1)
    second = tiny_drafter(target.config, block_size=BLOCK, layers=1, role="variable_prefix", seed=2)
    return target, first, second, tiny_flex(target, block_size=BLOCK)


def copies() -> tuple[Decoder, Drafter, Drafter, FlexHead]:
    return deepcopy(models())


@cache
def some_requests() -> tuple[Request, ...]:
    """Ten, two of each way to sample, prompts of 1 to 17 tokens, all seeds different."""
    dice = random.Random(7)
    return tuple(
        Request(
            prompt=tuple(dice.randrange(64) for _ in range(length)),
            max_new_tokens=dice.randrange(12, 26),
            sampling=SamplingParams(kind.temperature, kind.top_p, kind.top_k, (kind.seed or 0) ^ (0x10 * turn)),
        )
        for turn in (1, 2)
        for kind, length in zip(_KINDS, (1, 2, 5, 9, 17), strict=True)
    )


@cache
def plain(
    prompt: tuple[int, ...], sampling: SamplingParams, length: int, stop_tokens: frozenset[int] = frozenset()
) -> tuple[int, ...]:
    return tuple(plain_text(models()[0], prompt, sampling, length, stop_tokens))


def expected(request: Request) -> list[int]:
    """The request's answer by the oracle; stop tokens do not end it."""
    return list(_longer(request)[: request.max_new_tokens])


def _longer(request: Request) -> tuple[int, ...]:
    return plain(request.prompt, request.sampling, request.max_new_tokens + BLOCK, request.stop_tokens)


def cheater(
    requests: SequenceOf[Request], *, first_errors: float = 0.3, second_errors: float = 0.3, alone: bool = False
) -> CheatingRunner:
    """Knows the plain text of all `requests`; with `alone` the first drafter is the only one."""
    texts = {r.seed: r.prompt + _longer(r) for r in requests}
    assert len(texts) == len(requests)
    target, first, second, flex = copies()
    second_or_none, flex_or_none = (None, None) if alone else (second, flex)
    return CheatingRunner(
        target, first, second_or_none, flex_or_none, texts, first_errors=first_errors, second_errors=second_errors
    )


def honest() -> ModelRunner:
    return runner_of(*copies())


def make_engine(
    runner: ModelRunner,
    policy: PolicyName = "d2sd",
    *,
    max_batch: int = 4,
    page_size: int = 4,
    prefill_chunk: int = 16,
    pages: int | None = None,
    row_budget: int = BUDGET,
    decode: Decode | None = None,
    calibration: Calibration | None = None,
    prefix_cache: bool = True,
    lookup: bool = False,
) -> Engine:
    size = runner.block_size
    made = make_policy(policy, block_size=size, branches=BRANCHES, row_budget=row_budget, lookup=lookup)
    made = made.among(runner.drafters)
    kv_memory = None if pages is None else (1 + pages) * runner.page_bytes(page_size)
    limits = Limits(max_batch, 64, page_size, prefill_chunk, kv_memory, prefix_cache)
    return Engine(runner, made, limits, decode, calibration)


def run_staggered(
    engine: Engine, requests: SequenceOf[Request], *, order: SequenceOf[int] | None = None, gap: int = 0
) -> list[Sequence]:
    """Run requests to their end, one joining every `gap` steps in the given order; results in the order of `requests`.

    What was streamed must add up to the answers.
    """
    waiting = list(order if order is not None else range(len(requests)))
    sequences: dict[int, Sequence] = {}
    outputs: list[Output] = []
    for step in range(2000):
        while waiting and step >= gap * len(sequences):
            index = waiting.pop(0)
            sequences[index] = engine.submit(requests[index])
        outputs += engine.step()
        if not waiting and not engine.busy:
            break
    else:
        raise AssertionError("no end")
    for sequence in sequences.values():
        own = [o for o in outputs if o.sequence is sequence]
        assert [t for o in own for t in o.tokens] == sequence.answer
        assert [o.finish for o in own] == [None] * (len(own) - 1) + [sequence.finish]
    return [sequences[index] for index in range(len(requests))]


def free_pages(engine: Engine) -> int:
    return engine.scheduler.pages.free


def all_pages(engine: Engine) -> int:
    """Pages that may be handed out."""
    return engine.scheduler.page_count - 1


def poison(runner: ModelRunner, pages: int | slice) -> None:
    for pool in runner.pools:
        pool.k[:, pages] = torch.nan
        pool.v[:, pages] = torch.nan


def committed(pool: KVPool, table: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """K and V [L, S, Hkv, D] of the leading tokens."""
    places = torch.arange(length)
    page, slot = table[places // pool.page_size], places % pool.page_size
    return pool.k[:, page, slot], pool.v[:, page, slot]


def afterwards(owner: object, name: str, then: Callable[..., None]) -> None:
    """Call `then` with the arguments of the owner's method after each call of it."""
    method = getattr(owner, name)

    def both(*arguments: object) -> None:
        method(*arguments)
        then(*arguments)

    setattr(owner, name, both)


def poison_what_is_given_up(runner: ModelRunner) -> None:
    """Pages hold NaN until they are written, and again when they are dropped."""

    def dropped(pages: SequenceOf[int]) -> None:
        for page in pages:
            poison(runner, slice(page, page + 1))

    poison(runner, slice(None))
    afterwards(runner.context, "drop", dropped)


def sync_drafters(runner: ModelRunner) -> None:
    """Bring all drafters' pages up to date, which otherwise waits until they draft."""
    runner.context.inject(runner.drafters)


def check_pages(runner: ModelRunner, table: Tensor, tokens: list[int]) -> None:
    """All pools hold what one pass over `tokens` from nothing gives."""
    sync_drafters(runner)
    target, *drafters, _ = models()
    out = target.full_pass(torch.tensor([tokens]), aux_layer_ids=runner.aux_layer_ids)
    k, v = committed(runner.pools[0], table, len(tokens))
    torch.testing.assert_close(k, out.k[:, 0], atol=1e-4, rtol=0)
    torch.testing.assert_close(v, out.v[:, 0], atol=1e-4, rtol=0)
    for drafter, pool in zip(drafters, runner.pools[1:], strict=True):
        keys, values = drafter.context_keys_values(out.features, torch.arange(len(tokens))[None])
        k, v = committed(pool, table, len(tokens))
        torch.testing.assert_close(k, keys[:, 0], atol=1e-4, rtol=0)
        torch.testing.assert_close(v, values[:, 0], atol=1e-4, rtol=0)


def gumbel_scores(logits: Tensor, depth: Tensor, context_len: Tensor, depths: int, sampling: Sampling) -> Tensor:
    """Scores [B, T, V] that the target takes the argmax of, for rows [B, T] of any depths."""
    noise = sampling.noise(context_len, depths, logits.shape[-1])
    rows = torch.arange(len(logits))
    columns = [
        token_scores(
            logits[:, t], context_len + 1 + depth[:, t], sampling, None if noise is None else noise[rows, depth[:, t]]
        )
        for t in range(logits.shape[1])
    ]
    return torch.stack(columns, 1)


def choices(logits: Tensor, depth: Tensor, context_len: Tensor, depths: int, sampling: Sampling) -> Tensor:
    """The target's choice [B, T] after each row."""
    return gumbel_scores(logits, depth, context_len, depths, sampling).argmax(-1)
