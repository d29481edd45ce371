"""Models, requests and ways of running them that the engine's tests share."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from copy import deepcopy
from dataclasses import replace
from functools import cache, partial
from typing import Any, Literal

import torch
from hypothesis import settings
from torch import Tensor

from d2sd.modeling.config import Family
from d2sd.modeling.decoder import Decoder
from d2sd.modeling.drafters.dflash import Drafter
from d2sd.modeling.drafters.flexdraft import FlexHead
from d2sd.modeling.drafters.interface import DraftModel
from d2sd.modeling.kv_pool import KVPool
from d2sd.runtime.engine import Engine
from d2sd.runtime.memory import PoolBytes
from d2sd.runtime.model_runner import ModelRunner
from d2sd.runtime.pools import PoolLayout
from d2sd.runtime.request import Limits, Request
from d2sd.runtime.sampling.sample import Sampling, token_scores
from d2sd.runtime.sampling_params import SamplingParams
from d2sd.runtime.sequence import Output, Sequence
from d2sd.runtime.speculation.calibration import Calibration
from d2sd.runtime.speculation.policy import make_policy
from d2sd.runtime.text import Decode
from d2sd.runtime.thought import Markers
from tests.runtime.cheating import CheatingRunner
from tests.runtime.oracle import plain_text
from tests.tiny import of_case, policy_name, runner_of, tiny_decoder, tiny_drafter, tiny_flex

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


Models = tuple[Decoder, Drafter, Drafter, FlexHead]

#: Windows of the layers of the target and of both drafters.
WINDOWS: dict[str, tuple[tuple[int | None, ...], ...]] = {
    "none": ((), (), ()),
    "drafters": ((), (6,), (9,)),
    "mixed drafters": ((), (6, None), (None, 9)),
    "mixed target": ((7, None), (), ()),
    "mixed": ((None, 7), (3, None), (9,)),
    "all": ((7, 5), (6,), (6,)),
}
#: In the place of a name of `WINDOWS`: a target with gated delta nets, and no layer with a window.
HYBRID = "hybrid"


@cache
def models(windows: str = "none") -> Models:
    """Target, drafters and FlexDraft head, the same for all; who changes them gets `copies`."""
    of_target, of_first, of_second = WINDOWS.get(windows, WINDOWS["none"])
    # What the compiled kernels take, or two gated delta nets.
    dense: Callable[..., Decoder] = partial(tiny_decoder, "qwen3", layers=2, windows=of_target)
    target = (partial(tiny_decoder, "qwen3_5_text") if windows == HYBRID else dense)(head_dim=16)
    config = target.config
    first = tiny_drafter(config, block_size=BLOCK, layers=max(1, len(of_first)), attention={"windows": of_first})
    layers = max(1, len(of_second))
    second = tiny_drafter(
        config, block_size=BLOCK, layers=layers, role="variable_prefix", seed=2, attention={"windows": of_second}
    )
    flex: Any = None if windows == HYBRID else tiny_flex(target, block_size=BLOCK)  # it needs a dense target
    return target, first, second, flex


def copies(windows: str = "none") -> Models:
    return deepcopy(models(windows))


def last_token_decoder(seed: int, family: Family = "llama", **shape: Any) -> Decoder:
    """A target that reads its last token alone, which soon walks in circles."""
    target = tiny_decoder(family, layers=2, seed=seed, tie=False, **shape)
    for name, parameter in target.named_parameters():
        if "o_proj" in name:
            parameter.zero_()
    return target


def circling(case: str = "hybrid", depth: int | None = None, *, seed: int = 1) -> ModelRunner:
    """Such a target behind drafters that are hardly ever right; steps of `depth` tokens, or of a block."""
    target = last_token_decoder(seed)
    first = tiny_drafter(target.config, block_size=BLOCK)
    second = tiny_drafter(target.config, block_size=BLOCK, role="variable_prefix", seed=2)
    drafters = of_case(case, first, second, tiny_flex(target, block_size=BLOCK))
    return runner_of(target, *drafters, block_size=depth)


def placed(case: str = "", windows: str = "none") -> tuple[Decoder, DraftModel, DraftModel | None]:
    """The target and the drafters of one of `CASES` in their places; of no case the pair."""
    target, *drafters = copies(windows)
    return target, *of_case(case, *drafters)


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


def switched(request: Request, speculative: bool | dict[Literal["policy"], str]) -> Request:
    return replace(request, sampling=replace(request.sampling, speculative=speculative))


@cache
def plain(
    prompt: tuple[int, ...],
    sampling: SamplingParams,
    length: int,
    stop_tokens: frozenset[int] = frozenset(),
    windows: str = "none",
    markers: Markers | None = None,
) -> tuple[int, ...]:
    return tuple(plain_text(models(windows)[0], prompt, sampling, length, stop_tokens, markers))


def expected(request: Request, windows: str = "none") -> list[int]:
    """The request's answer by the oracle; stop tokens do not end it."""
    return list(_longer(request, windows)[: request.max_new_tokens])


def _longer(request: Request, windows: str) -> tuple[int, ...]:
    if windows != HYBRID:  # the target alone writes the text
        windows = next(name for name, one in WINDOWS.items() if one[0] == WINDOWS[windows][0])
    how = request.prompt, request.sampling, request.max_new_tokens + BLOCK, request.stop_tokens
    return plain(*how, windows, request.markers)


def texts_of(requests: SequenceOf[Request]) -> dict[int, tuple[int, ...]]:
    """The plain text of each request by its seed, a block longer than what it asks for."""
    texts = {r.seed: r.prompt + _longer(r, "none") for r in requests}
    assert len(texts) == len(requests)
    return texts


def cheater(
    requests: SequenceOf[Request], case: str = "", *, first_errors: float = 0.3, second_errors: float = 0.3
) -> CheatingRunner:
    """Knows the plain text of all `requests`."""
    return CheatingRunner(*placed(case), texts_of(requests), first_errors=first_errors, second_errors=second_errors)


def honest(windows: str = "none", case: str = "") -> ModelRunner:
    return runner_of(*placed(case, windows))


def memory_of(runner: ModelRunner, pages: int, limits: Limits) -> int:
    """Bytes of so many pages, and of the recurrent states that go with them."""
    each = runner.layout.bytes_of(limits.page_size)
    memory, state = (1 + pages) * each.page, each.state
    # Snapshots are at most a quarter of what requests' states leave, themselves included.
    snapshots = min(limits.max_batch * limits.prefix_cache, memory // (3 * state)) if state else 0
    return memory + (1 + limits.max_batch + snapshots) * state


def make_engine(
    runner: ModelRunner,
    policy: str = "d2sd",
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
    """`policy` is one of `CASES`."""
    size = runner.block_size
    made = make_policy(policy_name(policy), block_size=size, branches=BRANCHES, row_budget=row_budget, lookup=lookup)
    made = made.among(runner.drafters)
    limits = Limits(max_batch, 64, page_size, prefill_chunk, None, prefix_cache)
    if pages is not None:
        limits = replace(limits, kv_memory=memory_of(runner, pages, limits))
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
    return sum(group.pages.free for group in engine.scheduler.kv_cache.groups)


def all_pages(engine: Engine) -> int:
    """Pages that may be handed out."""
    return sum(group.pages.count - 1 for group in engine.scheduler.kv_cache.groups)


class OneTable(ModelRunner):
    """All layers have the pages of one table: none is freed before its request ends."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.layout = _Whole(self.layout.target, self.layout.drafters, self.layout.dtype)


class _Whole(PoolLayout):
    def bytes_of(self, page_size: int) -> PoolBytes:
        return replace(super().bytes_of(page_size), windowed=None)


def windowed_bound(engine: Engine) -> int:
    """Most pages that a request may have of layers with a window."""
    windows = [group.window for group in engine.scheduler.kv_cache.groups if group.window is not None]
    return engine.limits.pages_within(windows[0], engine.runner.block_size) if windows else 0


def poison(runner: ModelRunner, pages: int | slice, tables: SequenceOf[int] = (0, 1)) -> None:
    """Fill pages of these numbers with NaN; `tables`: of which page tables."""
    for part in (part for pool in runner.pools for part in pool._parts if part.table in tables):
        part.k[:, pages] = torch.nan
        part.v[:, pages] = torch.nan


def check_pool(pool: KVPool, tables: dict[int, Tensor], k: Tensor, v: Tensor) -> None:
    """The pages of a request hold k, v [L, S, ...] of its tokens, but for those behind a window that are freed."""
    for part in pool._parts:
        places = torch.arange(k.shape[1])
        pages = tables[part.table][places // pool.page_size]
        assert part.table or pages.all()
        kept = places[pages > 0]
        for stored, wanted in ((part.k, k), (part.v, v)):
            found = stored[:, pages[kept], kept % pool.page_size]
            torch.testing.assert_close(found, part.of(wanted[:, None])[:, 0, kept], atol=1e-4, rtol=0)


def afterwards(owner: object, name: str, then: Callable[..., None]) -> None:
    """Call `then` with the arguments of the owner's method after each call of it."""
    method = getattr(owner, name)

    def both(*arguments: object) -> None:
        method(*arguments)
        then(*arguments)

    setattr(owner, name, both)


def poison_what_is_given_up(runner: ModelRunner) -> None:
    """Pages hold NaN until they are written, and again when they are dropped; slots of states until they are."""

    def dropped(pages: SequenceOf[int], windowed_pages: SequenceOf[int] = ()) -> None:
        for windowed, given_up in ((False, pages), (True, windowed_pages)):
            for page in given_up:
                poison(runner, slice(page, page + 1), (windowed,))

    poison(runner, slice(None))
    for states in () if runner.target_pool.states is None else runner.target_pool.states.tensors:
        states[:, 1:] = torch.nan
    afterwards(runner.context, "drop", dropped)


def poison_free_slots(engine: Engine) -> None:
    """Fill the slots of recurrent state with NaN that neither a running request nor a snapshot has."""
    states = engine.runner.target_pool.states
    free = [] if states is None else list(engine.scheduler.kv_cache.states._pool._free)
    for tensor in () if states is None else states.tensors:
        tensor[:, free] = torch.nan


def sync_drafters(runner: ModelRunner) -> None:
    """Bring all drafters' pages up to date, which otherwise waits until they draft."""
    runner.context.inject(runner.drafters)


def check_pages(
    runner: ModelRunner,
    table: Tensor,
    tokens: list[int],
    windowed_table: Tensor | None = None,
    windows: str | tuple[Any, ...] = "none",
) -> None:
    """All pools hold what one pass over `tokens` from nothing gives, by models of these windows or by those given."""
    sync_drafters(runner)
    given: tuple[Any, ...] = models(windows) if isinstance(windows, str) else windows
    target, *drafters, _ = given
    with_context = [one for one, model in zip(drafters, runner.drafters.values(), strict=False) if model.has_context]
    out = target.full_pass(torch.tensor([tokens]), aux_layer_ids=runner.aux_layer_ids)
    tables = {0: table} if windowed_table is None else {0: table, 1: windowed_table}
    check_pool(runner.pools[0], tables, out.k[:, 0], out.v[:, 0])
    for drafter, pool in zip(with_context, runner.pools[1:], strict=True):
        if drafter.autoregressive:
            continue  # tests/runtime/test_eagle3.py
        k, v = drafter.context_keys_values(out.features, torch.arange(len(tokens))[None])
        check_pool(pool, tables, k[:, 0], v[:, 0])


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
