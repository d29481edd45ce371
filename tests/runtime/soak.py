"""A long random run of an engine whose host is one step late, against the answers of one that is never late.

    python -m tests.runtime.soak STEPS [SEED [WINDOWS | hybrid]]

Requests arrive, stop, are cancelled, preempted and find cached prefixes while policies take turns; some need the host
between two steps. Graphs are recorded operators (recorded_graphs.py). Between two steps the memory of the graphs, their
inputs, the state of rows that are gone, all free pages and all free slots of recurrent state are overwritten. WINDOWS
are those of the models' layers, a name in helpers.py.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from functools import cache

import torch

from d2sd.modeling.kv_pool import PoolSizes
from d2sd.runtime.engine import Engine
from d2sd.runtime.request import Request
from d2sd.runtime.sampling_params import SamplingParams
from d2sd.runtime.sequence import Output, Sequence
from d2sd.runtime.speculation.policy import Policy, make_policy
from tests.runtime.cheating import Knowing
from tests.runtime.helpers import (
    BLOCK,
    BRANCHES,
    BUDGET,
    OneTable,
    all_pages,
    check_pages,
    copies,
    free_pages,
    make_engine,
    placed,
    poison,
    poison_free_slots,
    poison_what_is_given_up,
    windowed_bound,
)
from tests.runtime.recorded_graphs import RecordedGraphs
from tests.tiny import FLEX_CASES, policy_name, prepared

LONGEST, VOCABULARY = 22, 64
POLICIES = ("off", "off", "chain", "chain", "chain", "d2sd", "d2sd", "hybrid", "lookup")
FLEX_POLICIES = ("off", "flex", "flex_tree", "lookup", "flex_parallel")
_SAMPLED = SamplingParams(1.0), SamplingParams(0.8, top_p=0.9)
#: Parameters that need the host between two steps.
_FENCED = (
    {"repetition_penalty": 1.3},
    {"logprobs": 2},
    {"logit_bias": {5: 1.5}},
    {"bad_words_token_ids": ((7, 8), (9,))},
)


def decode(tokens: list[int]) -> str:
    return "".join(chr(0x30 + token) for token in tokens)


class Thirds:
    """A grammar: token t may come n-th unless t and n are equal modulo 3. Nothing ends it."""

    end_tokens: frozenset[int] = frozenset()
    error = ""

    def __init__(self) -> None:
        self._length = 0

    def matcher(self) -> Thirds:
        return Thirds()

    def allowed(self) -> bytes:
        bits = sum(1 << token for token in range(VOCABULARY) if token % 3 != self._length % 3)
        return bits.to_bytes(VOCABULARY // 8, "little")

    def consume(self, token: int) -> bool:
        fine = token % 3 != self._length % 3
        self._length += fine
        return fine

    def rollback(self, count: int) -> None:
        self._length -= count


@cache
def pool(windows: str = "none") -> dict[Request, list[int]]:
    """Requests and their longest answers, by an engine that decodes plainly, operator by operator; it frees no page."""
    dice, found = random.Random(11), list[Request]()
    for index in range(40):
        prompt = tuple(dice.randrange(VOCABULARY) for _ in range(dice.randrange(1, 16)))
        if index % 3 == 2:  # for prefix hits
            prompt = (found[-1].prompt + prompt)[:20]
        kind = SamplingParams() if index % 7 else _SAMPLED[index // 7 % 2]
        params = replace(kind, seed=index + 1)
        if index % 8 == 4:
            params = replace(params, **_FENCED[index // 8 % len(_FENCED)])
        found.append(Request(prompt, LONGEST, params, grammar=Thirds() if index % 13 == 6 else None))
    answers = make_engine(OneTable(*prepared(copies(windows)[0])), "off", max_batch=8).generate(found)
    return {request: sequence.answer for request, sequence in zip(found, answers, strict=True)}


def needs_host(request: Request) -> bool:
    """Between two steps."""
    params = request.sampling
    changed = params.has_penalty or params.logit_bias or params.bad_words_token_ids or params.logprobs is not None
    return bool(changed or request.grammar)


def cut(answer: SequenceOf[int], request: Request) -> tuple[list[int], str]:
    """The answer up to where it ends, and why."""
    for length in range(1, request.max_new_tokens + 1):
        own = list(answer[:length])
        if own[-1] in request.stop_tokens or any(string in decode(own) for string in request.stop):
            return own, "stop"
    return own, "length"


class Poisoned(Knowing):
    """Free pages hold NaN."""

    def allocate(self, sizes: PoolSizes) -> None:
        super().allocate(sizes)
        poison_what_is_given_up(self)


@dataclass
class Soak:
    """An engine under random load."""

    seed: int
    rerun: bool  # the graphs: run again, or recorded operators, which are checked more and slower
    windows: str = "none"
    case: str = ""  # one of `FLEX_CASES`: a FlexDraft head in place of the pair
    engine: Engine = field(init=False)
    policies: list[Policy] = field(init=False)
    expected: dict[Sequence, tuple[list[int], str]] = field(default_factory=dict)  # of what is not finished
    streamed: dict[Sequence, list[int]] = field(default_factory=dict)
    seen: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.dice = random.Random(self.seed)
        self.pool = pool(self.windows)
        texts = {r.seed: [*r.prompt, *answer, *[0] * BLOCK] for r, answer in self.pool.items()}
        self.engine = self._captured(make_engine(self._runner(texts), "off", max_batch=4, pages=20, decode=decode))
        self.most = windowed_bound(self.engine)
        self.engine.runner.keep_text()
        sizes = {"block_size": BLOCK, "branches": BRANCHES, "row_budget": BUDGET}
        cases = FLEX_POLICIES if self.case in FLEX_CASES else POLICIES
        made = [make_policy(policy_name(name), **sizes, lookup=True) for name in cases]
        self.policies = [policy for policy in made if {*policy.drafters} <= self.engine.runner.drafters.keys()]

    def _runner(self, texts: dict[int, list[int]]) -> Poisoned:
        return Poisoned(*placed(self.case, self.windows), texts)

    def _captured(self, engine: Engine) -> Engine:
        """The engine with graphs."""
        self.graphs = RecordedGraphs(rerun=self.rerun)
        return self.graphs.guard(engine)

    def run(self, steps: int) -> Counter[str]:
        """Serve until so many decode steps have been launched, then until nothing is left; returns what happened."""
        while self.engine.stats.steps < steps:
            self._turn()
        while self.engine.busy:
            self._step()
        assert not self.expected
        assert free_pages(self.engine) == all_pages(self.engine), "pages leaked"
        stats = self.engine.stats
        assert stats.slots_used == 0, "slots leaked"
        self.seen |= {"steps": stats.steps, "preemptions": stats.preemptions, "prefix hits": stats.prefix_hit_tokens}
        return self.seen

    def _turn(self) -> None:
        dice = self.dice
        if dice.random() < 0.35 and len(self.expected) < 7:
            self._submit()
        if dice.random() < 0.2:
            self.engine.policy = dice.choice(self.policies)
        if dice.random() < 0.03:
            self.engine.record_trace = not self.engine.record_trace and dice.random() < 0.3
        if self.expected and dice.random() < 0.03:
            one = dice.choice(list(self.expected))
            self.seen["cancelled late"] += one.launched
            self.engine.cancel(one)
            answer, _ = self.expected.pop(one)
            assert self.streamed[one] == answer[: len(self.streamed[one])]
        self._step()

    def _submit(self) -> None:
        dice = self.dice
        request, answer = dice.choices(
            list(self.pool.items()), [1 if needs_host(request) else 6 for request in self.pool]
        )[0]
        stop_tokens = frozenset(dice.sample(range(VOCABULARY), dice.choice((0, 0, 1, 3, 12))))
        stop: tuple[str, ...] = ()
        if dice.random() < 0.25:
            at = dice.randrange(len(answer) - 1)
            stop = (decode(answer[at : at + 2]),)
        wanted = replace(
            request,
            max_new_tokens=dice.randrange(1, LONGEST + 1),
            stop_tokens=stop_tokens,
            stop=stop,
            priority=dice.choice((0, 0, 0, 1)),
            client=dice.choice("aab"),
        )
        sequence = self.engine.submit(wanted)
        self.expected[sequence], self.streamed[sequence] = cut(answer, wanted), []

    def _step(self) -> None:
        for output in self.engine.step():
            self._check(output)
        self.seen["late"] += self.engine._launched is not None
        running = self.engine.scheduler.running
        if self.dice.random() < 0.02:
            for one in [one for one in running if one.cached]:
                self._check_pages(one)
        poison(self.engine.runner, slice(0, 1))
        poison_free_slots(self.engine)
        held = [sum(page > 0 for page in one.windowed_pages) for one in running]
        assert max(held, default=0) <= self.most, "pages behind the window are kept"
        self.seen["most windowed pages"] = max(self.seen["most windowed pages"], *held, 0)
        self.seen["freed behind windows"] += sum(one.windowed_pages.count(0) for one in running)

    def _check_pages(self, one: Sequence) -> None:
        tables = torch.tensor(one.pages), torch.tensor(one.windowed_pages) if one.windowed_pages else None
        check_pages(self.engine.runner, tables[0], one.tokens[: one.cached], tables[1], self.windows)

    def _check(self, output: Output) -> None:
        sequence = output.sequence
        self.streamed[sequence] += output.tokens
        answer, reason = self.expected[sequence]  # a finished sequence has no further output
        assert self.streamed[sequence] == sequence.answer == answer[: len(sequence.answer)], sequence.request
        if output.finish is not None:
            assert (sequence.answer, output.finish) == (answer, reason), sequence.request
            if sequence.request.sampling.logprobs is not None:
                assert [entry.token for entry in sequence.logprobs] == answer
            self.seen["dropped late"] += sequence.launched
            self.seen[reason] += 1
            del self.expected[sequence], self.streamed[sequence]


def main(steps: str, seed: str = "1", windows: str = "none") -> None:
    start, soak = time.perf_counter(), Soak(int(seed), rerun=True, windows=windows)
    while soak.engine.stats.steps < int(steps):
        done = soak.run(min(int(steps), soak.engine.stats.steps + 1000))
        print(f"{done['steps']} steps, {time.perf_counter() - start:.0f} s: {dict(done)}", flush=True)
    print(f"{soak.engine.stats.steps} steps, 0 differ")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
