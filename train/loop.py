"""The training loop of a drafter or of its head: resumable, seeded, with the same data on one process or several."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from d2sd.errors import D2SDError
from d2sd.modeling.decoder import Decoder
from d2sd.modeling.drafters.interface import DraftModel
from d2sd.train.data.draws import PrefixDraws, SeededOrder, choose_prefixes, draw_kinds
from d2sd.train.data.features import TrainingData
from d2sd.train.data.packing import Packed
from d2sd.train.dist import Dist
from d2sd.train.objectives.loss import BlockLoss, Candidates, first_rejections
from d2sd.train.products import product_dtype
from d2sd.train.state import Identity, Optimizer, digest_of, load_state, rate_factor, reached, save_state
from d2sd.train_recipe import LoopSettings, SecondSettings, TrainSettings

#: Waits for a step's metrics.
Told = Callable[[], dict[str, float]]
#: report(step, metrics): loss, gradient norm, learning rate, each term of the loss.
Report = Callable[[int, dict[str, float]], None]


@dataclass(frozen=True, slots=True)
class Drawn:
    """The data of one step, on the training's device."""

    batches: list[tuple[Packed, PrefixDraws | None]]  # of each micro-batch
    candidates: Candidates


def on_host(values: Tensor) -> Callable[[], list[float]]:
    """Begin to copy them to the host; what is returned waits for them, and not for later work."""
    if not values.is_cuda:
        return values.tolist
    copied = values.to("cpu", non_blocking=True)
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()

    def wait() -> list[float]:
        done.synchronize()
        return cast("list[float]", copied.tolist())

    return wait


class Loop(ABC):
    """The steps of a training of `trained`, a drafter or a part of one; with `first`, of a second drafter."""

    def __init__(
        self,
        trained: nn.Module,
        data: TrainingData,
        settings: LoopSettings,
        first: DraftModel | None,
        dist: Dist,
        identity: Identity,
    ) -> None:
        """`identity`: what else determines the result."""
        self.data, self.settings, self.first, self.dist = data, settings, first, dist
        self.step = 0
        self.reached: float = 0  # of `steps`, whether they were taken or their time has passed
        self._trained, self._is_cuda = trained, next(trained.parameters()).is_cuda
        self._optimizer = Optimizer(trained, settings)
        self._draws = SeededOrder(settings.seed, len(data), settings.batch, dist)
        self._identity = {
            "settings": settings.model_dump(exclude={"save_every", "evaluate_every"}),
            **identity,
            "data": {"sha256": data.digest},
            "first drafter": {"sha256": None if first is None else digest_of(first)},
        }

    @abstractmethod
    def _update(self) -> Told:
        """Launch a step."""

    def run(self, folder: Path, report: Report, evaluate: Callable[[int], None] | None = None) -> None:
        """Train to the last step, saving to `folder`; `evaluate(step)` after every `evaluate_every` steps.

        A step is saved after its evaluation, so a run that is killed while evaluating evaluates again.
        """
        settings, begun = self.settings, None
        every = settings.evaluate_every if isinstance(settings, TrainSettings) else settings.steps
        self.step = load_state(folder, self._trained, self._optimizer, self._identity)
        self.reached = self.step
        waiting: deque[tuple[int, Told]] = deque()
        while self.reached < settings.steps:
            told = self._update()
            self.step += 1
            begun = begun or time.monotonic()  # the first step compiles
            # of all processes, whose drafters stay the same
            self.reached = self.dist.mean({"place": reached(settings, self.step, begun)})["place"]
            last = self.reached == settings.steps
            evaluating = evaluate is not None and (last or self.step % every == 0)
            saving = last or self.step % settings.save_every == 0
            waiting.append((self.step, told))
            # A GPU works on a step while the next one is launched, and is not waited for.
            while len(waiting) > (self._is_cuda and not evaluating and not saving):
                step, told = waiting.popleft()
                metrics = self.dist.mean(told())
                if self.dist.is_main:
                    report(step, metrics)
            if evaluate is not None and evaluating:
                evaluate(self.step)
            if self.dist.is_main and saving:
                step = settings.steps if last else self.step
                save_state(folder, step, self._trained, self._optimizer, self._identity)
        self.dist.barrier()

    def _taken(self, metrics: Mapping[str, Tensor]) -> Told:
        """Launch the optimizer's step by the gradients, and the copy of what a step says to the host."""
        norm = torch.nn.utils.clip_grad_norm_(self._trained.parameters(), self.settings.clip)
        rate = self.settings.learning_rate * rate_factor(self.settings, self.reached)
        self._optimizer.update(rate)
        values = on_host(torch.stack([value.float() for value in (*metrics.values(), norm)]))
        return partial(self._told, self.step, rate, [*metrics, "gradient norm"], values)

    def _told(self, step: int, rate: float, names: list[str], values: Callable[[], list[float]]) -> dict[str, float]:
        """Wait for a step, and return what it says. Raises D2SDError if it is not finite."""
        metrics = dict(zip(names, values(), strict=True))
        if not (math.isfinite(metrics["loss"]) and math.isfinite(metrics["gradient norm"])):
            responses = ", ".join(self.data.name(self._draws.index(number)) for number in self._draws.numbers(step))
            raise D2SDError(
                "the loss is not finite",
                where=f"step {step + 1}",
                found=f"loss {metrics['loss']}, gradient norm {metrics['gradient norm']}, responses {responses}",
                fix="lower the learning rate, or look for damaged responses",
            )
        return metrics | {"learning rate": rate}

    def _autocast(self, device: torch.device) -> torch.autocast:
        dtype = product_dtype(self.settings.precision, device)
        return torch.autocast(device.type, torch.bfloat16, enabled=dtype is torch.bfloat16)


class Trainer(Loop):
    """Trains `drafter`, which is attached to `target`; with `first`, a second drafter on prefixes.

    With several processes each runs its share of every step. Slot weights are normalised within a micro-batch, so its
    size has a small effect on the result.
    """

    settings: TrainSettings

    def __init__(
        self,
        target: Decoder,
        drafter: DraftModel,
        data: TrainingData,
        settings: TrainSettings,
        first: DraftModel | None = None,
        dist: Dist | None = None,
    ) -> None:
        identity = {"drafter": asdict(cast("Any", drafter.config))}
        super().__init__(drafter, data, settings, first, dist or Dist(), identity)
        self.drafter = drafter
        assert settings.batch % self.dist.size == 0, "the caller runs Dist.check first"
        self._head, self._embedding = target.head.detach(), target.embedding.detach()
        self._frequent = data.frequent(settings.frequent, target.config.vocab_size)
        self._loss = BlockLoss(drafter, self._embedding, settings.objective)
        self._wrapped = self.dist.wrap_ddp(self._loss)
        # Prepares the next step while a GPU's backward pass is launched, for which Python waits. Not of several
        # processes: they agree on a step's ids, in the order of their calls.
        self._ahead = ThreadPoolExecutor(1) if self._head.is_cuda and self.dist.size == 1 else None
        self._next: tuple[int, Future[Drawn]] | None = None

    def _update(self) -> Told:
        """Launch a step."""
        settings = self.settings
        drawn = self._drawn()
        sequences = sum(len(packed.tokens) for packed, _ in drawn.batches)
        total: dict[str, Tensor] = {}
        for index, (packed, draws) in enumerate(drawn.batches):
            share = len(packed.tokens) / sequences  # the last micro-batch may be smaller
            with self._accumulate(last=index == len(drawn.batches) - 1), self._autocast(self._head.device):
                terms = self._wrapped(packed, *self._visible(packed, drawn.candidates, draws), drawn.candidates)
                loss = sum((settings.objective.terms[name] * value for name, value in terms.items()), start=0.0)
                if index == len(drawn.batches) - 1:
                    self._begin_next()
                (loss * share).backward()  # type: ignore[union-attr]
            for name, value in {"loss": loss, **terms}.items():
                total[name] = total.get(name, 0.0) + value.detach() * share
        return self._taken(total)

    def _begin_next(self) -> None:
        step = self.step + 1
        if self._ahead is not None and step < self.settings.steps:
            self._next = step, self._ahead.submit(self._prepare, step)

    def _drawn(self) -> Drawn:
        if self._next is not None and self._next[0] == self.step:
            return self._next[1].result()
        return self._prepare(self.step)

    def _prepare(self, step: int) -> Drawn:
        size, device = self.settings.micro_batch, self._head.device
        drawn: Sequence[int] = self._draws.numbers(step)
        numbers = sorted(drawn, key=lambda number: self.data.length(self._draws.index(number)))  # see `attend_dense`
        batches = [self._draw(numbers[start : start + size]) for start in range(0, len(numbers), size)]
        candidates = self._candidates([packed for packed, _ in batches], step)
        return Drawn([(packed.to(device), draws) for packed, draws in batches], candidates)

    def _draw(self, numbers: Sequence[int]) -> tuple[Packed, PrefixDraws | None]:
        """The blocks of a micro-batch, and what is drawn for their prefixes."""
        sequences = [self.data[self._draws.index(number)] for number in numbers]
        packed = self._draws.blocks(sequences, numbers, self.settings.blocks, self.drafter.config.block_size)
        if self.first is None:
            return packed, None
        assert isinstance(self.settings, SecondSettings)
        generators = [self._draws.generator("prefixes", number) for number in numbers]
        return packed, draw_kinds(self.settings, self.drafter.config.block_size, generators).to(self._head.device)

    def _candidates(self, batches: list[Packed], step: int) -> Candidates:
        always = self._frequent.clone()
        for packed in batches:
            always[packed.tokens[packed.inside]] = True
        always = self.dist.all_reduce_any(always)  # so that all processes draw the same negatives
        dtype = product_dtype(self.settings.precision, self._head.device)
        generator = self._draws.generator("candidates", step)
        return Candidates.draw(self._head, always, self.settings.negatives, dtype, generator)

    def _visible(self, packed: Packed, candidates: Candidates, draws: PrefixDraws | None) -> tuple[Tensor, Tensor]:
        """Length of each block's prefix of real tokens [B, A], and the id masked in the next slot (-1: none)."""
        shape, device = packed.tokens.shape[:2], packed.tokens.device
        if self.first is None or draws is None:
            return torch.ones(shape, dtype=torch.long, device=device), torch.full(shape, -1, device=device)
        assert isinstance(self.settings, SecondSettings)
        errors, drafted = first_rejections(self.first, self._embedding, packed, candidates)
        return choose_prefixes(errors, drafted, packed.tokens.shape[-1], self.settings, draws)

    def _accumulate(self, *, last: bool) -> AbstractContextManager[None]:
        """Gradients are all-reduced once a step, in its last micro-batch."""
        if last or not isinstance(self._wrapped, DistributedDataParallel):
            return nullcontext()
        return self._wrapped.no_sync()
