"""The table of `generate --stats`."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from d2sd.console import show_table
from d2sd.progress import bar
from d2sd.runtime.stats import COPY, FIRST_DRAFT, Clock, EngineStats, SequenceStats, mean_tau

if TYPE_CHECKING:
    from d2sd.runtime.engine import Engine
    from d2sd.runtime.request import Request


def time_plain(make: Callable[[], Engine], requests: Sequence[Request], tokens: int) -> Clock:
    """The clock of plain decoding of the same requests to the same lengths: batch and context change as they did."""
    gc.collect()  # the engine before it may be held by a cycle
    engine = make()
    with bar("timing plain decoding", tokens) as advance:
        for output in engine.stream(requests):
            advance(len(output.tokens))
    return engine.clock


def show_stats(requests: Sequence[SequenceStats], engine: EngineStats, clock: Clock, plain: Clock) -> None:
    """Print the statistics of speculation to stderr. `plain` timed the same requests by plain decoding."""
    total = SequenceStats.merged(requests)
    cost = clock.step_seconds / plain.step_seconds
    speedup = plain.step_seconds * plain.steps / (clock.step_seconds * clock.steps)
    table = Table("statistic", "value", "meaning", title="speculation")
    row = table.add_row
    row("tau", f"{mean_tau(requests):.2f}", "tokens a step, bonus included: mean over requests")
    row("tau by token", f"{total.tau:.2f}", f"the same over all {total.steps} steps")
    row("trees", ", ".join(f"{name}: {steps}" for name, steps in total.policies.most_common()), "steps by policy")
    accepted = total.joint_acceptance()
    row(
        "accepted by position",
        " ".join(f"{share:.2f}" for share in accepted) or "none",
        "share of steps that accepted k drafts or more",
    )
    won = sorted(total.accepted_branches.items())
    known = {FIRST_DRAFT: "first draft", COPY: "copy of earlier text"}
    names = (known.get(proposer, f"branch {proposer}") for proposer, _ in won)
    row(
        "won by",
        ", ".join(f"{n} {c}" for n, (_, c) in zip(names, won, strict=True)) or "none",
        "steps with a draft accepted",
    )
    row(
        "rows verified",
        f"{total.verified_nodes / total.steps:.0f}",
        f"a step; {total.verified_nodes / total.tokens:.1f} for each token",
    )
    row("prefix hits", f"{engine.prefix_hit_rate:.0%}", "of the prompt tokens, taken from the prefix cache")
    row("cycle cost", f"{cost:.2f}", f"mean time of a step over that of {plain.steps} plain ones, of the same requests")
    row("speedup", f"{speedup:.2f}", "of all steps, prefill left out: above 1, speculation pays on this machine")
    stages = {name: seconds for name, seconds in clock.seconds.items() if name != "prefill"}
    whole = sum(stages.values())
    row("a step's time", ", ".join(f"{n} {s / whole:.0%}" for n, s in stages.items() if s / whole >= 0.005), "by stage")
    show_table(table, Console(stderr=True))
