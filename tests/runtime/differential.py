"""Random engines against plain decoding: each request, with whatever beside it, ends as it ends alone.

    python -m tests.runtime.differential STEPS [--seed S]

An episode is a tiny random model of two to four layers, some with windows or experts, each fifth with gated delta nets,
a third with heads that the compiled kernels do not take, some with NaN, infinity or overflowing numbers in a weight, of
all tokens or of a single one; and requests with random parameters, their bounds included. They are decoded alone, one
token a step, in pages that are kept to the end; then together by policies that take turns, in few pages, with
cancellations, cached prefixes, grammars and, in some, steps that are graphs. Tokens, text, finish reason, error and
log-probabilities must be the same, and all pages and slots free at the end.

With an empty D2SD_CC nothing is compiled. There, and of heads that the kernels do not take, a row's last bits depend on
its neighbours: models are fp32, and log-probabilities may differ by rounding. Where rounding decides, as between two
tokens of which the filters keep one, an answer may be that of plain decoding with weights which differ in their last
bits. Without the kernels no weight is a huge number, by which rounding becomes an overflow or another expert: the order
of a sum depends on the number of rows.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from d2sd.modeling.config import Family
from d2sd.modeling.decoder import Decoder
from d2sd.modeling.drafters.dflash import Drafter
from d2sd.modeling.drafters.flexdraft import FlexHead
from d2sd.plugins.cpu import library
from d2sd.runtime.engine import Engine, Prepared
from d2sd.runtime.policy_selector import PolicySelector
from d2sd.runtime.request import Limits, Request, buckets
from d2sd.runtime.sampling.sample import GREEDY_BELOW
from d2sd.runtime.sampling_params import SamplingParams
from d2sd.runtime.sequence import Sequence
from d2sd.runtime.speculation.policy import Chain, DDTree, Off, Policy, make_policy
from d2sd.runtime.step_times import StepTimes
from tests.runtime.cheating import Knowing
from tests.runtime.helpers import BLOCK, BRANCHES, WINDOWS, OneTable, all_pages, free_pages, memory_of
from tests.runtime.recorded_graphs import RecordedGraphs
from tests.runtime.soak import VOCABULARY, Thirds, decode
from tests.tiny import (
    FLEX_CASES,
    HEADS,
    PAIR_CASES,
    of_case,
    policy_name,
    prepared,
    tiny_decoder,
    tiny_drafter,
    tiny_flex,
)

Models = tuple[Decoder, Drafter, Drafter, FlexHead | None]
TYPES = torch.float32, torch.float32, torch.bfloat16, torch.float16
FAMILIES: tuple[Family, ...] = ("llama", "qwen2", "qwen3", "qwen3", "qwen3_moe", "gpt_oss", "gemma3_text")
HYBRIDS: tuple[Family, ...] = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
#: FlexDraft drafts in these.
DENSE: tuple[Family, ...] = ("llama", "qwen2", "qwen3")
BROKEN = torch.nan, torch.nan, torch.inf, -torch.inf, 3e38, 1e38, -1e38, 1e30, 1e19, -1e19
NOT_FINITE = torch.nan, torch.inf, -torch.inf
#: Models whose weights differ by so much, relatively, that tell whether rounding decides.
SHAKEN, LAST_BITS = 8, 5e-7
#: Most tokens a step.
DEPTHS = 6, 9, 16
#: Policies that `auto` has, and tokens a step that it expects of them, greedy and sampled.
AUTO: tuple[Policy, ...] = (Off(1), Chain(4), DDTree(4), DDTree(8))
FORECAST = {name: ([1.0, 1.5, 2.0, 2.5, 2.6, 2.7, 2.8, 3.0],) * 2 for name in ("chain", "ddtree")}


def models(dice: random.Random, *, hybrid: bool = False) -> Models:
    """A random target and its drafters, most with heads that score candidates behind their parents; two thirds of them
    have a broken weight.
    """
    family, seed = dice.choice(HYBRIDS if hybrid else FAMILIES), dice.randrange(50)
    own = random.Random(f"{seed} {family}")
    heads = own.choices([None, *HEADS.values()], k=2)
    windows, *behind = own.choice([*WINDOWS.values()])
    layers, size = dice.choice((2, 3, 3, 4)), dice.choice((16, 16, 8))
    given: dict[str, Any] = {} if hybrid or not windows else {"windows": (windows * layers)[:layers]}
    target = tiny_decoder(family, layers=layers, head_dim=size, tie=dice.random() < 0.5, seed=seed, **given)
    first = tiny_drafter(target.config, block_size=BLOCK, layers=1, head=heads[0], attention={"windows": behind[0][:1]})
    second = tiny_drafter(
        target.config,
        block_size=BLOCK,
        layers=1,
        head=heads[1],
        role="variable_prefix",
        seed=2,
        attention={"windows": behind[1][:1]},
    )
    made: list[Any] = [target, first, second]
    if family in DENSE:
        made.append(tiny_flex(target, block_size=BLOCK))
    if dice.random() < 0.67:
        break_weight(made[0] if dice.random() < 0.8 else dice.choice(made), dice)
    kind = dice.choice(TYPES) if is_exact(target) else torch.float32
    target, first, second, *flex = (model.to(kind) for model in made)
    return target, first, second, flex[0] if flex else None


def is_exact(target: Decoder) -> bool:
    """Whether a row's bits do not depend on what is computed beside it."""
    return target.config.body.head_dim % library.HEAD_STEP == 0 and library.available()


@torch.no_grad()
def break_weight(model: torch.nn.Module, dice: random.Random) -> None:
    """Break a weight in a place, a row or everywhere; or what few tokens meet: an embedding, one expert's weights, one
    unit's bias.
    """
    weights = dict(model.named_parameters())
    kinds = ("embed_tokens",), (".gate_up", ".down"), ("bias",)
    few = [found for kind in kinds if (found := [name for name in weights if any(part in name for part in kind)])]
    single = dice.random() < 0.6 and few
    weight = weights[dice.choice(dice.choice(few) if single else [*weights])]
    place = tuple(dice.randrange(size) for size in weight.shape)
    part = place[: dice.choice((1, 1, 2, 3) if single else (0, 1, 1, 2, 2, 2))]
    weight[part] = dice.choice(BROKEN if library.available() else NOT_FINITE)


def parameters(dice: random.Random, seed: int) -> SamplingParams:
    """Each parameter off, at a usual value, or at a bound."""

    def value(off: float, *others: float) -> float:
        return off if dice.random() < 0.65 else dice.choice(others)

    def token() -> int:
        return dice.randrange(VOCABULARY)

    biases = {token(): dice.choice((-100.0, 100.0, 3.0, -1.5)) for _ in range(dice.choice((0, 0, 0, 1, 4, VOCABULARY)))}
    words = [tuple(token() for _ in range(dice.randrange(1, 5))) for _ in range(dice.choice((0, 0, 0, 1, 9, 90)))]
    return SamplingParams(
        temperature=dice.choice((0.0, 0.0, 0.8, 1.0, 1.0, GREEDY_BELOW, GREEDY_BELOW / 2, 99.9)),
        top_p=value(1.0, 0.9, 0.5, 1e-300),
        top_k=int(value(0, 1, 5, 20, 2**31 - 1)),
        seed=seed,
        min_p=value(0.0, 0.1, 1.0, 1e-45, 1e-300),
        repetition_penalty=value(1.0, 1.3, 0.7, 0.01, 100.0),
        presence_penalty=value(0.0, 1.0, 2.0, -2.0),
        frequency_penalty=value(0.0, 1.0, 2.0, -2.0),
        logit_bias=biases,
        bad_words_token_ids=words,
        min_tokens=dice.choice((0, 0, 0, 1, 5)),
        logprobs=dice.choice((None, None, None, 0, 3, 20)),
        prompt_logprobs=dice.choice((None, None, None, 0, 3, 20)),
    )


def requests(dice: random.Random) -> list[Request]:
    """Some requests whose prompts begin alike, with different seeds."""
    found = list[Request]()
    for seed in range(dice.randrange(2, 9)):
        prompt = tuple(dice.randrange(VOCABULARY) for _ in range(dice.randrange(1, 16)))
        if found and dice.random() < 0.4:
            prompt = (dice.choice(found).prompt + prompt)[:20]
        stop = tuple(decode([dice.randrange(VOCABULARY) for _ in range(dice.choice((1, 1, 2)))]) for _ in range(3))
        found.append(
            Request(
                prompt,
                dice.randrange(5, 23),
                parameters(dice, dice.randrange(2**30) * 16 + seed),
                frozenset(dice.sample(range(VOCABULARY), dice.choice((0, 0, 1, 9)))),
                stop if dice.random() < 0.3 else (),
                dice.random() < 0.5,
                Thirds() if dice.random() < 0.15 else None,
                dice.choice((0, 0, 0, 1)),
                client=("", "", "a", "b")[seed % 4],
            )
        )
    return found


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
        rows = tuple(dice.randrange(1, step.policy.num_nodes + 1) for _ in step.batch.anchor)
        return replace(step, batch=replace(step.batch, rows=rows))

    engine.prepare = cut  # type: ignore[method-assign]
    return engine


@dataclass
class Episode:
    """One random engine; everything about it follows from its seed."""

    seed: int
    seen: Counter[str] = field(default_factory=Counter)
    differing: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.dice = random.Random(self.seed)
        self.requests = requests(self.dice)

    @cached_property
    def alone(self) -> list[tuple[dict[str, Any], str]]:
        """The answer of each request, and its text, by plain decoding with nothing beside it."""
        return self._plain(self.models(), self.requests)

    def _plain(self, made: Models, requests: list[Request]) -> list[tuple[dict[str, Any], str]]:
        engine = Engine(OneTable(*prepared(*made[:3])), Off(1), Limits(1, 64, 4, 64, prefix_cache=False), decode)
        found = []
        for request in requests:
            outputs = list(engine.stream([request]))
            found.append((answer(outputs[-1].sequence), "".join(output.text for output in outputs)))
        return found

    def models(self) -> Models:
        return models(random.Random(self.seed), hybrid=self.hybrid)

    @property
    def hybrid(self) -> bool:
        """Whether the target has gated delta nets."""
        return self.seed % 5 == 4

    def engine(self) -> Engine:
        """With few pages, several requests at a time, and in a third of the episodes one step late."""
        dice = self.dice
        texts = {
            request.seed: [*request.prompt, *told["tokens"], *[0] * max(DEPTHS)]
            for request, (told, _) in zip(self.requests, self.alone, strict=True)
        }
        made: Any = self.models()
        target, first, second, flex = made
        case = "flex" if flex is not None and dice.random() < 0.3 else ""
        self.exact, self.cases = is_exact(target), ("off", "lookup", *FLEX_CASES) if case else PAIR_CASES
        # deeper than a block in a third of the episodes: copies go on where drafts end
        depth = dice.choice(DEPTHS) if dice.random() < 0.3 else None
        runner = Knowing(target, *of_case(case, first, second, flex), texts, block_size=depth)
        page_size = dice.choice((4, 8))
        pages = dice.choice(((39 + runner.block_size) // page_size + 2, 90 // page_size, 200))
        limits = Limits(dice.randrange(1, 6), 64, page_size, dice.choice((3, 8, 16, 64)), None, dice.random() < 0.7)
        limits = replace(limits, kv_memory=memory_of(runner, pages, limits))
        engine = Engine(runner, dice.choice(self.policies()), limits, decode)
        engine.runner.keep_text()  # the policies that take turns may copy
        if dice.random() < 0.2:
            served = [(policy, size) for policy in AUTO for size in buckets(limits.max_batch)]
            costs: dict[tuple[Policy, int], float] = {one: dice.random() for one in served}
            engine.selector = PolicySelector(AUTO, StepTimes.of(costs), FORECAST, dice.random)
        if dice.random() < 0.3:
            return RecordedGraphs(rerun=True).guard(engine)
        return cutting(engine, dice) if dice.random() < 0.4 else engine

    def policies(self) -> list[Policy]:
        budget, copies = self.dice.choice((2, 7, 14, 30)), self.dice.random() < 0.5
        sizes = {"block_size": BLOCK, "branches": BRANCHES, "row_budget": budget}
        return [make_policy(policy_name(case), **sizes, lookup=copies) for case in self.cases]

    def run(self) -> Episode:
        """Decode all together and compare; `differing` says what differs."""
        dice, engine = self.dice, self.engine()
        waiting, turning, policies = list(range(len(self.requests))), dice.random() < 0.5, self.policies()
        running: dict[Sequence, int] = {}
        texts: dict[int, str] = dict.fromkeys(waiting, "")
        while waiting or engine.busy:
            if waiting and (not engine.busy or dice.random() < 0.5):
                number = waiting.pop(dice.randrange(len(waiting)))
                running[engine.submit(self.requests[number])] = number
            if turning and dice.random() < 0.3:
                engine.policy = dice.choice(policies)
            if running and dice.random() < 0.02:
                engine.cancel(dice.choice(list(running)))
            for output in engine.step():
                texts[running[output.sequence]] += output.text
        for sequence, number in running.items():
            self._compare(sequence, texts[number], *self.alone[number])
        stats = engine.stats
        self.seen["leaked"] = all_pages(engine) - free_pages(engine) + stats.slots_used
        self.seen |= Counter(steps=stats.steps, preempted=stats.preemptions, hits=stats.prefix_hit_tokens)
        return self

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
            self.differing.append(f"episode {self.seed}: {what}: {sequence.request}")

    def _rounded(self, sequence: Sequence, found: dict[str, Any]) -> bool:
        """Whether weights with other last bits give these tokens and this text."""
        for seed in range(SHAKEN):
            made = self.models()
            for weight in made[0].parameters():
                noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed))
                weight.data *= 1 + LAST_BITS * noise
            ((told, text),) = self._plain(made, [sequence.request])
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
