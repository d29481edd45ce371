"""Random engines against plain decoding: each request, with whatever beside it, ends as it ends alone.

    python -m tests.runtime.differential STEPS [--seed S]

An episode is an engine of one configuration (configurations.py) over tiny random models, some with NaN, infinity or
overflowing numbers in a weight; and requests with random parameters, their bounds included. They are decoded alone, one
token a step, in pages that are kept to the end; then together, in pages that hold NaN until they are written and again
when they are freed, with cancellations and whatever the configuration says. Tokens, text, finish reason, error and
log-probabilities must be the same, the pages of all models hold what one pass over the tokens gives, now and then, and
all pages and slots are free at the end.

Where a row's bits do not depend on its neighbours, all logits of committed tokens are compared, bit for bit. Elsewhere,
where kernels are not compiled or do not take a model's heads and with two ranks, models are fp32 and log-probabilities
may differ by rounding. Where rounding decides, as between two tokens of which the filters keep one, an answer may be
that of plain decoding with weights which differ in their last bits. Without the kernels no weight is a huge number, by
which rounding becomes an overflow or another expert: the order of a sum depends on the number of rows.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from d2sd.plugins.cpu import library
from d2sd.plugins.lookup import Text
from d2sd.plugins.trees import Accepted
from d2sd.policies import DraftUse
from d2sd.runtime.batch import Batch
from d2sd.runtime.cuda_graphs.steps import DecodeSteps
from d2sd.runtime.drafting import context
from d2sd.runtime.engine import Engine, Prepared
from d2sd.runtime.model_runner import ModelRunner, Verified
from d2sd.runtime.parallel.leader import LeadingSteps
from d2sd.runtime.policy_selector import PolicySelector
from d2sd.runtime.request import Limits, Request, buckets
from d2sd.runtime.sequence import Sequence
from d2sd.runtime.speculation.calibration import Calibration
from d2sd.runtime.speculation.policy import Chain, DDTree, Lookup, Off, Policy, make_policy
from d2sd.runtime.step_times import RowTimes, StepTimes
from tests.runtime.cheating import Knowing, changing
from tests.runtime.configurations import Configuration, any_of
from tests.runtime.drawn_engines import Models, models, requests
from tests.runtime.helpers import (
    BLOCK,
    BRANCHES,
    OneTable,
    all_pages,
    check_pages,
    free_pages,
    memory_of,
    poison,
    poison_free_slots,
    poison_what_is_given_up,
    switched,
    windowed_bound,
)
from tests.runtime.nan_pages import NaNScratch
from tests.runtime.recorded_graphs import RecordedGraphs
from tests.runtime.soak import decode
from tests.runtime.thread_ranks import Threads
from tests.tiny import FLEX_CASES, PAIR_CASES, of_case, policy_name, prepared

#: Models whose weights differ by so much, relatively, that tell whether rounding decides.
SHAKEN, LAST_BITS = 8, 5e-7
#: Tokens a step: of a block, and where copies go on behind a draft.
DEPTHS = {"block": BLOCK, "deeper": 9, "deepest": 32}
#: Policies that `auto` has, and tokens a step that it expects of them, greedy and sampled.
AUTO: tuple[Policy, ...] = (Off(1), Lookup(4), Chain(4), DDTree(4, lookup=True), DDTree(8))
FORECAST = {name: ([1.0, 1.5, 2.0, 2.5, 2.6, 2.7, 2.8, 3.0],) * 2 for name in ("chain", "ddtree")}
#: By seed and position: the logits behind each committed token.
Logits = dict[tuple[int, int], Tensor]


class Kept(ModelRunner):
    """Mixin: keeps the logits along accepted paths, of steps that are no graph's."""

    logits: Logits | None = None

    def commit(self, batch: Batch, verified: Verified, accepted: Accepted) -> None:
        super().commit(batch, verified, accepted)
        for row in range(0 if self.logits is None else int(batch.active.sum())):
            start, seed = int(batch.where.context_len[row]), int(batch.sampling.seed[row])
            for step, node in enumerate(accepted.path[row, : accepted.count[row]].tolist()):
                self.logits[seed, start + step] = verified.at(row, node).clone()  # type: ignore[index]


class Alone(Kept, OneTable):
    """A runner of plain decoding."""


class Guarded(Kept, NaNScratch):
    """Pages hold NaN until they are written, and again when they are given up, as page 0 does behind every write."""

    #: By seed: the tokens that a request may have; empty in steps that are a graph's.
    known: Mapping[int, list[int]] = {}
    #: Whether NaN can only be read from such pages; not asked in steps that are a graph's.
    healthy = False

    def allocate(self, *sizes: Any) -> None:
        super().allocate(*sizes)
        poison_what_is_given_up(self)
        changing(self.drafts, "_pass", self._checked)

    def _checked(self, found: tuple[Tensor, Tensor], *_: object) -> tuple[Tensor, Tensor]:
        assert not (self.healthy and found[0].isnan().any()), "a drafter reads what nobody wrote"
        return found

    def text(self, batch: Batch) -> Text:
        """Copies are of a request's own text."""
        text = super().text(batch)
        for row in range(int(batch.active.sum()) if self.known else 0):
            length = int(text.context_len[row])
            said = [*text.pages[text.page_table[row]].flatten()[:length].tolist(), int(text.anchor[row])]
            assert said == self.known[int(batch.sampling.seed[row])][: len(said)], "another request's text"
        return text


class Right(Guarded, Knowing):
    """Two thirds of its drafts are right."""


def answer(sequence: Sequence) -> dict[str, Any]:
    """Everything that a request's sender sees."""
    return {
        "tokens": sequence.answer,
        "finish": sequence.finish,
        "error": str(sequence.error),
        "logprobs": sequence.logprobs,
        "prompt_logprobs": list(sequence.prompt_logprobs),
    }


def cutting(engine: Engine, dice: random.Random) -> Engine:
    """The engine, whose trees have as many nodes for each request as the dice say, as under `auto` on a CPU."""
    prepare = engine.prepare

    def cut(sequences: list[Sequence]) -> Prepared:
        step = prepare(sequences)
        rows = torch.tensor([dice.randrange(1, step.policy.num_nodes + 1) for _ in step.batch.anchor])
        return replace(step, batch=replace(step.batch, rows=rows.minimum(step.batch.rows)))  # type: ignore[arg-type]

    engine.prepare = cut  # type: ignore[method-assign]
    return engine


@dataclass
class Episode:
    """An engine of a configuration, by default a random one; everything else about it follows from its seed."""

    seed: int
    configuration: Configuration = None  # type: ignore[assignment]
    seen: Counter[str] = field(default_factory=Counter)
    differing: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.dice = random.Random(self.seed)
        self.configuration = self.configuration or any_of(self.dice)
        if not library.available() and self.configuration.kernels == "compiled":
            self.configuration = replace(self.configuration, kernels="none", type="fp32")
        self.requests = requests(self.dice, self.configuration)
        one = self.configuration
        self.exact = one.kernels == "compiled" and one.ranks == "one" and library.available()
        self.block_size = DEPTHS[one.depth]

    @contextmanager
    def as_configured(self) -> Iterator[None]:
        """With or without the compiled kernels; drafters wait as long as they may."""
        with pytest.MonkeyPatch.context() as patch:
            if self.configuration.kernels == "none":
                patch.setattr(library, "available", lambda: False)
            if self.configuration.context == "late":
                patch.setattr(context, "MAX_PENDING_ROWS", 10**9)
            yield

    def models(self) -> Models:
        return models(random.Random(self.seed), self.configuration)

    @cached_property
    def alone(self) -> tuple[list[tuple[dict[str, Any], str]], Logits]:
        """The answer of each request and its text, by plain decoding with nothing beside it, and all logits."""
        return self._plain(self.models(), self.requests)

    def _plain(self, made: Models, requests: list[Request]) -> tuple[list[tuple[dict[str, Any], str]], Logits]:
        runner = Alone(*prepared(*made[:3]))
        runner.logits = {}
        engine = Engine(runner, Off(1), Limits(1, 64, 4, 64, prefix_cache=False), decode)
        found = []
        for request in requests:
            outputs = list(engine.stream([switched(request, True)]))
            found.append((answer(outputs[-1].sequence), "".join(output.text for output in outputs)))
        return found, runner.logits

    def limits(self) -> Limits:
        """A page table of few tokens a page; `tight` pages hold hardly more than the longest request."""
        one, dice = self.configuration, self.dice
        batch = 1 if one.room == "alone" else dice.randrange(2, 6)
        return Limits(batch, 64, dice.choice((1, 4, 8)), dice.choice((1, 3, 8, 16, 64)), None, one.prefixes == "cached")

    def within(self, runner: ModelRunner, limits: Limits) -> Limits:
        size = limits.page_size
        pages = (42 + self.block_size) // size + 2 if self.configuration.room == "tight" else 800 // size
        return replace(limits, kv_memory=memory_of(runner, pages, limits))

    def runner(self) -> ModelRunner:
        one, (target, first, second, flex) = self.configuration, self.models()
        given = of_case(one.policy, first, None if one.drafters == "first" else second, flex)  # type: ignore[arg-type]
        texts = {
            request.seed: [*request.prompt, *told["tokens"], *[0] * max(DEPTHS.values())]
            for request, (told, _) in zip(self.requests, self.alone[0], strict=True)
        }
        if one.drafts == "right":
            runner: Guarded = Right(target, *given, texts, block_size=self.block_size)
        else:
            runner = Guarded(*prepared(target, *given), block_size=self.block_size)
        if one.steps in ("eager", "cut"):
            runner.known = texts if self.exact else {}
            runner.logits = {} if self.exact else None
            runner.healthy = one.weights == "whole" and one.drafts != "nan"
        return runner

    def engine(self, folder: Path) -> Engine:
        one, dice, limits, steps = self.configuration, self.dice, self.limits(), DecodeSteps
        captured = one.steps in ("late", "recorded")
        self.close: Callable[[], None] = lambda: None
        if one.ranks == "two":
            ranks = Threads(2, folder, self.models, limits, captured=captured, block_size=self.block_size)
            runner: ModelRunner = ranks.runner
            steps, self.close = LeadingSteps, ranks.close
            if one.drafters == "first":
                runner.drafters.pop(max(runner.drafters))
        else:
            runner = self.runner()
        self.policies = [policy for policy in self.served() if {*policy.drafters} <= runner.drafters.keys()]
        policy = self.policies[0]
        calibration = None if one.calibration == "none" else straightened(dice, self.block_size)
        engine = Engine(runner, policy, self.within(runner, limits), decode, calibration, make_steps=steps)
        engine.offer({policy.name: policy for policy in self.policies})
        runner.context._on_cpu = one.context == "in time"  # else as on a GPU, where rows are not dropped one by one
        if one.policy == "auto":
            served = [(policy, size) for policy in AUTO for size in buckets(limits.max_batch)]
            costs: dict[tuple[Policy, int], float] = {step: dice.random() for step in served}
            engine.offer({policy.name: policy for policy in AUTO})
            times = StepTimes.of(costs)
            verify = None if captured else RowTimes.of(times)
            engine.selector = PolicySelector(AUTO, times, FORECAST, dice.random, self.block_size - 1, verify)
        if captured:
            return RecordedGraphs(rerun=one.steps == "late").guard(engine)
        return cutting(engine, dice) if one.steps == "cut" else engine

    def served(self) -> list[Policy]:
        """The configured policy, and those that take turns with it."""
        one, budget = self.configuration, self.dice.choice((2, 7, 14, 30))
        sizes = {"block_size": BLOCK, "branches": BRANCHES, "row_budget": budget}
        cases = ["off" if one.policy == "auto" else one.policy]
        if one.turns == "policies":
            cases += ["off", "lookup", *FLEX_CASES] if one.policy in FLEX_CASES else PAIR_CASES
        copies = one.copies == "copies"
        made = [make_policy(policy_name(case), **sizes, lookup=copies) for case in cases]
        return made if one.drafters == "both" else [policy.among([*policy.drafters][:1]) for policy in made]

    def run(self) -> Episode:
        """Decode all together and compare; `differing` says what differs."""
        with self.as_configured(), tempfile.TemporaryDirectory() as folder:
            self._run(self.engine(Path(folder)))
            self.close()
        return self

    def _run(self, engine: Engine) -> None:
        dice, most = self.dice, windowed_bound(engine)
        waiting, running = list(range(len(self.requests))), dict[Sequence, int]()
        texts: dict[int, str] = dict.fromkeys(waiting, "")
        while waiting or engine.busy:
            if waiting and (not engine.busy or dice.random() < 0.5):
                number = waiting.pop(dice.randrange(len(waiting)))
                running[engine.submit(self.requests[number])] = number
            if self.configuration.turns == "policies" and dice.random() < 0.3:
                engine.policy = dice.choice(self.policies)
            if running and dice.random() < 0.02:
                engine.cancel(dice.choice(list(running)))
            for output in engine.step():
                texts[running[output.sequence]] += output.text
            poison(engine.runner, 0)
            poison_free_slots(engine)
            if self.has_plain_pages and dice.random() < 0.15:
                self._check_pages(engine)
            held = [sum(page > 0 for page in one.windowed_pages) for one in engine.scheduler.running]
            assert max(held, default=0) <= most, "pages behind the window are kept"
        for sequence, number in running.items():
            if not sequence.speculates:
                plain = sequence.stats
                assert plain.tokens == plain.steps == plain.verified_nodes, "speculation is off"
                self.seen["plain"] += plain.steps
            self._compare(sequence, texts[number], *self.alone[0][number])
        self._compare_logits(getattr(engine.runner, "logits", None) or {})
        stats = engine.stats
        self.seen["leaked"] = all_pages(engine) - free_pages(engine) + stats.slots_used
        accepted = sum(sequence.stats.tokens - sequence.stats.steps for sequence in running)
        self.seen |= Counter(
            steps=stats.steps, preempted=stats.preemptions, hits=stats.prefix_hit_tokens, accepted=accepted
        )

    @property
    def has_plain_pages(self) -> bool:
        """Whether one pass in fp32 says what its pages hold: no weight is broken, and no rank has a part of them."""
        one = self.configuration
        return (one.weights, one.type, one.ranks) == ("whole", "fp32", "one") and one.drafts != "nan"

    def _check_pages(self, engine: Engine) -> None:
        target, first, second, flex = self.models()
        drafters = (flex, second) if self.configuration.policy in FLEX_CASES else (first, second)
        for one in [one for one in engine.scheduler.running if one.cached]:
            windowed = torch.tensor(one.windowed_pages) if one.windowed_pages else None
            tokens = one.tokens[: one.cached]
            check_pages(engine.runner, torch.tensor(one.pages), tokens, windowed, (target, *drafters, None))
            self.seen["tables"] += 1

    def _compare_logits(self, found: Logits) -> None:
        """A step may commit past the last token that was asked for."""
        for place, row in found.items():
            wanted = self.alone[1].get(place)
            if wanted is not None and not torch.allclose(row, wanted, rtol=0, atol=0, equal_nan=True):
                self.differing.append(f"episode {self.seed}: logits at {place}")
                return

    def _compare(self, sequence: Sequence, text: str, told: dict[str, Any], told_text: str) -> None:
        found = answer(sequence) | {"text": text}
        expected = told | {"text": told_text}
        self.seen[f"ended by {found['finish']}"] += 1
        self.seen["tokens"] += len(sequence.answer)
        if found["finish"] == "cancelled":
            found = {"tokens": found["tokens"], "text": text}
            expected = {"tokens": told["tokens"][: len(found["tokens"])], "text": told_text[: len(text)]}
        if found.get("finish") == "error":  # its logits may be NaN, which have no order
            del found["logprobs"], found["prompt_logprobs"]
        if not self.exact and found["tokens"] != expected["tokens"] and self._rounded(sequence, found):
            self.seen["decided by rounding"] += 1
            return
        different = [name for name in found if found[name] != expected[name] and not self._alike(name, found, expected)]
        for name in different:
            what = f"{name} {found[name]!s:.300}, alone {expected[name]!s:.300}"
            self.differing.append(f"episode {self.seed} ({self.configuration}): {what}: {sequence.request}")

    def _rounded(self, sequence: Sequence, found: dict[str, Any]) -> bool:
        """Whether weights with other last bits give these tokens and this text."""
        for seed in range(SHAKEN):
            made = self.models()
            for weight in made[0].parameters():
                noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed))
                weight.data *= 1 + LAST_BITS * noise
            ((told, text),), _ = self._plain(made, [sequence.request])
            if (told["tokens"][: len(found["tokens"])], text[: len(found["text"])]) == (found["tokens"], found["text"]):
                return True
        return False

    def _alike(self, name: str, found: dict[str, Any], expected: dict[str, Any]) -> bool:
        """Whether log-probabilities are those of the same tokens, and differ by rounding at most where that may be."""
        if "logprobs" not in name:
            return False
        if self.exact:  # as text, because NaN does not equal itself
            return str(found[name]) == str(expected[name])
        pairs = ([(one.token, one.logprob) for one in told[name]] for told in (found, expected))
        mine, theirs = (torch.tensor(pair, dtype=torch.float64).reshape(-1, 2) for pair in pairs)
        return mine.shape == theirs.shape and torch.allclose(mine, theirs, rtol=1e-3, atol=1e-3, equal_nan=True)


def straightened(dice: random.Random, block_size: int) -> Calibration:
    """A calibration that straightens every confidence into another."""
    draw, shape = torch.Generator().manual_seed(dice.randrange(99)), (2, len(DraftUse), block_size - 1, 2)
    return Calibration(0.5 + torch.rand(shape, generator=draw), torch.randn(shape, generator=draw))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", type=int)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    start, total, episodes, differing = time.perf_counter(), Counter[str](), 0, 0
    while total["steps"] < given.steps:
        episode = Episode(given.seed * 1_000_000 + episodes).run()
        total, episodes = total + episode.seen, episodes + 1
        differing += bool(episode.differing)
        for line in episode.differing:
            print(line, flush=True)
        if episodes % 100 == 0:
            print(f"{total['steps']} steps, {time.perf_counter() - start:.0f} s", flush=True)
    print(f"{total['steps']} steps, {episodes} episodes, {differing} differing, {total['leaked']} leaked")
    print(dict(total))
    raise SystemExit(bool(differing or total["leaked"]))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
