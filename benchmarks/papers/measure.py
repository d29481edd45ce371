"""Plays every arm over the plain answers of a set of prompts; keeps what each prompt gave."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import exp
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.papers.arms import Arm, Chain, accepted, nodes
from benchmarks.papers.book import Ask, Book
from d2sd.bundle.load import Bundle, load_bundle
from d2sd.bundle.requests import chat_request
from d2sd.bundle.serving import make_engine, scores_of
from d2sd.errors import D2SDError
from d2sd.io import digest, read_json, sha256, write_json
from d2sd.modeling.kv_pool import PoolSizes
from d2sd.policies import PolicyName
from d2sd.progress import bar
from d2sd.runtime.engine import Engine
from d2sd.runtime.model_runner import ModelRunner
from d2sd.runtime.request import Request
from d2sd.runtime.sampling_params import SamplingParams
from d2sd.runtime.speculation.calibration import Calibration


class Player(NamedTuple):
    """An arm, and how its drafters run."""

    arm: Arm
    block: int | None = None  # rows of their blocks; None: as many as they were trained for
    coupled: bool = True  # at T > 0 drafts are chosen with the target's noise; otherwise the likeliest tokens are


class Played(NamedTuple):
    """The steps of one arm over one answer."""

    accepted: list[int]  # tokens committed by each step, the target's own included
    nodes: list[int]  # rows verified by it


class PromptSet(NamedTuple):
    """Prompts of one kind."""

    name: str
    prompts: Sequence[tuple[str, str]]  # (id, text)


class Answer(NamedTuple):
    """One prompt: the steps of every arm over its answer."""

    id: str
    context: int  # tokens of the prompt
    played: Mapping[str, Played]  # by arm
    #: (probability as drafted, as calibrated, whether it was accepted) of the drafts that `chain` reached.
    drafts: Sequence[tuple[float, float, bool]]


@dataclass(frozen=True)
class Regime:
    """Prompts answered in one way."""

    name: str
    temperature: float
    max_new_tokens: int
    per_set: int
    players: Mapping[str, Player]

    @property
    def mark(self) -> str:
        """A hash of what an answer depends on."""
        return digest([self.temperature, self.max_new_tokens, repr(self.players)])[:12]


@dataclass
class Study:
    """A bundle whose answers are kept in the folder `out`."""

    path: Path
    out: Path

    def answers(self, own: PromptSet, regime: Regime) -> list[Answer]:
        """The first prompts of a set; those kept from an earlier run are read."""
        prompts, requests = own.prompts[: regime.per_set], self.requests(own, regime)
        folder = self._kept / f"{regime.name}-{own.name}-{regime.mark}"
        missing = [n for n in range(len(prompts)) if not (folder / f"{n}.json").is_file()]
        folder.mkdir(parents=True, exist_ok=True)
        texts = self._texts([requests[n] for n in missing], f"{regime.name}, {own.name}: answers")
        with bar(f"{regime.name}, {own.name}", len(missing)) as advance:
            for n, text in zip(missing, texts, strict=True):
                write_json(folder / f"{n}.json", self._played(prompts[n][0], requests[n], text, regime)._asdict())
                advance(1)
        return [_read(folder / f"{n}.json", regime) for n in range(len(prompts))]

    def engine(self, policy: PolicyName) -> Engine:
        """An engine of weights of its own, without copies: no seed has them."""
        return make_engine(self._loaded(), policy=policy, calibrated=False, prefix_cache=False, lookup=False)

    def _loaded(self) -> Bundle:
        """The bundle, whose steps are as long as its drafters' blocks."""
        bundle = load_bundle(self.path, verify=False)
        tree = bundle.recipe.tree.model_copy(update={"max_depth": None})
        recipe = bundle.recipe.model_copy(update={"tree": tree})
        return replace(bundle, manifest=bundle.manifest.model_copy(update={"recipe": recipe}))

    def requests(self, own: PromptSet, regime: Regime) -> list[Request]:
        """The requests of a set's first prompts."""
        return [
            chat_request(self._described, text, SamplingParams(regime.temperature, seed=n), regime.max_new_tokens)
            for n, (_, text) in enumerate(own.prompts[: regime.per_set])
        ]

    @cached_property
    def _kept(self) -> Path:
        """The folder of this bundle's answers."""
        return self.out / "answers" / sha256(self.path / "manifest.json")[:12]

    @cached_property
    def _described(self) -> Bundle:
        return self._loaded()

    @cached_property
    def _plain(self) -> Engine:
        return self.engine("off")

    @cached_property
    def _drafting(self) -> Engine:
        return self.engine("d2sd")

    @cached_property
    def _runners(self) -> dict[int | None, ModelRunner]:
        return {None: self._drafting.runner}

    def _runner(self, block: int | None) -> ModelRunner:
        """The drafters in blocks of so many rows."""
        if block not in self._runners:
            whole = self._drafting
            smaller = ModelRunner(whole.runner.target, whole.runner.drafters, block_size=block)
            smaller.allocate(PoolSizes(whole.runner.page_counts[0], whole.limits.page_size))
            self._runners[block] = smaller
        return self._runners[block]

    def _texts(self, requests: Sequence[Request], title: str) -> list[list[int]]:
        """Plain answers to requests, and the tokens behind their end that a step may have drafted."""
        room = self._runner(None).block_size
        longer = [replace(r, stop_tokens=frozenset(), max_new_tokens=r.max_new_tokens + room) for r in requests]
        sequences = [self._plain.submit(request) for request in longer]
        with bar(title, len(sequences)) as advance:
            while self._plain.busy:
                advance(sum(output.finish is not None for output in self._plain.step()))
        return [sequence.tokens for sequence in sequences]

    def _played(self, name: str, request: Request, text: list[int], regime: Regime) -> Answer:
        start = len(request.prompt) - 1
        answer = text[start + 1 : start + 1 + request.max_new_tokens]
        ends = [n for n, token in enumerate(answer, 1) if token in request.stop_tokens]
        end = start + min(ends, default=len(answer))
        found, drafts = {}, list[tuple[float, float, bool]]()
        groups = dict.fromkeys((player.block, player.coupled) for player in regime.players.values())
        for block, coupled in groups:
            sampling = request.sampling if coupled else SamplingParams()
            book = Book(self._runner(block), self._calibration if block is None else None, text, sampling)
            for arm, player in regime.players.items():
                if (player.block, player.coupled) == (block, coupled):
                    found[arm] = _steps(book, player.arm, start, end)
            if block is None and coupled:
                drafts = _judged(book, start, end)
        return Answer(name, start + 1, found, drafts)

    @cached_property
    def _calibration(self) -> Calibration | None:
        file = self._described.calibration
        return None if file is None else scores_of(file)


def _steps(book: Book, arm: Arm, start: int, end: int) -> Played:
    """Play an arm from the anchor at `start` until the token at `end` is committed."""
    lengths, rows = [], []
    while start < end:
        lines = arm.lines(book, start)
        lengths.append(1 + accepted(lines, book.text[start + 1 :]))
        rows.append(nodes(lines))
        start += lengths[-1]
    return Played(lengths, rows)


def _judged(book: Book, start: int, end: int) -> list[tuple[float, float, bool]]:
    """The drafts that the steps of `chain` reached, with their probabilities."""
    found = []
    for length in _steps(book, Chain(), start, end).accepted:
        (block,) = book.ask(Ask(start))
        for slot in range(min(length, len(block.tokens))):
            found.append((exp(block.confidence[slot]), exp(block.calibrated[slot]), slot < length - 1))
        start += length
    return found


def _read(path: Path, regime: Regime) -> Answer:
    kept: Any = read_json(path, error=D2SDError)
    played = {arm: Played(*kept["played"][arm]) for arm in regime.players}
    return Answer(kept["id"], kept["context"], played, [tuple(one) for one in kept["drafts"]])


def served_steps(engine: Engine, requests: Sequence[Request]) -> list[list[int]]:
    """Tokens that an engine commits in each step of each request, for comparison: those behind the end are dropped."""
    sequences = [engine.submit(request) for request in requests]
    found: dict[int, list[int]] = {id(sequence): [] for sequence in sequences}
    while engine.busy:
        for output in engine.step():
            found[id(output.sequence)].append(len(output.tokens))
    return [found[id(sequence)] for sequence in sequences]
