"""Microseconds of the host by part of a decode step, without a model: what a GPU waits for, if it is faster.

    python -m benchmarks.host                                  # every row, about a minute
    python -m benchmarks.host --requests 64 --pages 2048       # one row

    schedule  pages of running requests grow, requests are admitted
    choose    `auto` reads the new tokens of each text and chooses the policy
    pack      tensors of the batch, its page table included
    load      these tensors into the static inputs of a CUDA graph; its copy to the device takes no time here
    retire    the tokens of a step are appended to their requests, and the selector learns from it
    text      they become text; the tokenizer is a table, so this is the work around it

Every request has a context of so many pages of 16 tokens, greedy and without a grammar, and gains 4 tokens a step. Each
figure is the median of 30 steps in CPU time of this thread, so that other work of the machine counts little. The engine
has the shapes of a GPU (`exact=False`, static inputs) on the meta device.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from types import SimpleNamespace
from typing import Any, cast

import click

from d2sd.modeling.kv_pool import PoolSizes
from d2sd.policies import DrafterRole
from d2sd.runtime.batch import Batch
from d2sd.runtime.cuda_graphs.inputs import Link, StaticInputs
from d2sd.runtime.decode import Committed
from d2sd.runtime.engine import Engine, Launched, Prepared
from d2sd.runtime.memory import PoolBytes
from d2sd.runtime.model_runner import ModelRunner
from d2sd.runtime.request import Limits, Request, bucket, power_of_two
from d2sd.runtime.speculation.policy import DDTree, Off, Policy
from d2sd.runtime.step_times import StepTimes
from d2sd.runtime.text import TextStream

REQUESTS, PAGES = (1, 8, 32, 64, 128), (128, 512, 2048)
PARTS = "schedule", "choose", "pack", "load", "retire", "text"
PAGE_SIZE, BLOCK, COMMITTED, VOCABULARY = 16, 16, 4, 151_936
STEPS, WARM_UPS = 30, 5
#: Pages of a request that are left for its answer.
_ROOM = -(-(STEPS + WARM_UPS) * COMMITTED // PAGE_SIZE) + 2
_POLICIES: tuple[Policy, ...] = (Off(1), DDTree(16), DDTree(32))
_CURVE = [1 + rows / (4 + rows) for rows in range(32)]


@dataclass
class Idle:
    """A runner that computes nothing."""

    device: str = "meta"
    vocab_size: int = VOCABULARY
    block_size: int = BLOCK
    static_shapes: bool = True
    capture: None = None
    text_pages: None = None
    context: Any = field(
        default_factory=lambda: SimpleNamespace(pending_of=lambda sequences: dict.fromkeys(DrafterRole, 0))
    )

    @property
    def layout(self) -> Idle:
        return self

    def bytes_of(self, page_size: int) -> PoolBytes:
        return PoolBytes(page_size)

    def allocate(self, sizes: PoolSizes) -> None:
        pass


@dataclass
class Stopwatch:
    """Microseconds of each part, of every step."""

    found: dict[str, list[float]] = field(default_factory=lambda: {part: [] for part in PARTS})

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time what runs inside."""
        begun = time.thread_time_ns()
        yield
        self.found[name].append((time.thread_time_ns() - begun) / 1e3)

    def medians(self) -> Mapping[str, float]:
        """The median of each part, without the first steps."""
        return {part: median(steps[WARM_UPS:]) for part, steps in self.found.items()}


def make_engine(requests: int, pages: int) -> Engine:
    """An engine whose `requests` have their prompts computed, of `pages` less those of the answer."""
    limits = Limits(requests, pages * PAGE_SIZE - BLOCK, PAGE_SIZE, requests * pages * PAGE_SIZE)
    engine = Engine(cast(ModelRunner, Idle()), _POLICIES[0], limits)
    sizes = range(1, bucket(requests) + 1)
    times = StepTimes.of({(policy, size): 1.0 + policy.num_nodes / 64 for policy in _POLICIES for size in sizes})
    engine.enable_auto(_POLICIES, {"ddtree": (_CURVE, _CURVE)}, measure=lambda *_: times)
    length = (pages - _ROOM) * PAGE_SIZE
    for number in range(requests):  # no two have a prefix in common
        prompt = tuple(range(number * 1000, number * 1000 + 1000)) * (length // 1000 + 1)
        engine.submit(Request(prompt[:length], limits.max_context - length))
    while any(sequence.pending for sequence in (*engine.scheduler.waiting, *engine.scheduler.running)):
        for sequence, count in engine.scheduler.schedule().prefill:
            sequence.cached += count
    return engine


def time_parts(requests: int, pages: int) -> Mapping[str, float]:
    """Microseconds of each part of a step of so many requests with so many pages each."""
    engine, watch, inputs = make_engine(requests, pages), Stopwatch(), None
    selector = engine.selector
    assert selector is not None
    streams = [TextStream(_decode) for _ in range(requests)]
    gc.collect()
    for step in range(STEPS + WARM_UPS):
        with watch.part("schedule"):
            assert engine.scheduler.make_room_ahead()
            sequences = engine.scheduler.schedule().decode
        assert len(sequences) == requests
        with watch.part("choose"):
            choice = selector.choose_for(sequences, engine.runner.context.pending_of(sequences))
        with watch.part("pack"):
            batch = Batch.pack(sequences, VOCABULARY, "meta")
        inputs = inputs or StaticInputs(batch, power_of_two(pages), "meta")
        with watch.part("load"):
            inputs.load(batch, Link.pack(sequences, len(batch.anchor), sequences))
        rows = (choice.policy.num_nodes,) * requests
        tokens = [[(7 * step + n + 13 * row) % VOCABULARY for n in range(COMMITTED)] for row in range(requests)]
        committed = [Committed(COMMITTED, 0, own, []) for own in tokens]
        launched = Launched(Prepared(sequences, choice.policy, batch, rows, choice), cast(Any, None), _given(committed))
        with watch.part("retire"):
            engine.retire(launched)
        with watch.part("text"):
            for stream, own in zip(streams, tokens, strict=True):
                stream.feed_all(own)
    return watch.medians()


def _given(committed: list[Committed]) -> Callable[[], list[Committed]]:
    return lambda: committed


def _decode(tokens: Iterable[int]) -> str:
    return "".join(f" {token}" for token in tokens)


@click.command()
@click.option("--requests", type=int, multiple=True, default=REQUESTS, show_default=True, help="Requests in a step.")
@click.option("--pages", type=int, multiple=True, default=PAGES, show_default=True, help="Pages of each request.")
def main(requests: tuple[int, ...], pages: tuple[int, ...]) -> None:
    """Print microseconds of the host by part of a step."""
    click.echo("requests  pages" + "".join(f"{part:>10}" for part in (*PARTS, "all")) + "   in µs")
    for count in requests:
        for length in pages:
            found = time_parts(count, length)
            cells = "".join(f"{microseconds:10,.0f}" for microseconds in (*found.values(), sum(found.values())))
            click.echo(f"{count:8}  {length:5}{cells}")


if __name__ == "__main__":
    main()
