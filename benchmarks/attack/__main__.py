"""Can one client take the server, or change a neighbour's answer? Hostile requests beside honest clients.

    python -m benchmarks.attack bundles/smollm2-135m --seed 1 --malformed 5000 --expensive 300 --out build/attack

Starts `d2sd serve` on the loopback device, measures four honest clients alone, then sends malformed and expensive
requests, drawn from the seed by class, beside them. Checked: no 5xx but 501 and 503 (504 for deadlines); the honest
clients' time to first token (p99) is at most three times its quiet median; memory is at most 1.2 times that at the
start; no page is lost; every answer is that of plain decoding; no error is in the log; SIGTERM ends cleanly. A server
that hangs, ends or takes too much memory is replaced, so that every class has its verdict. Writes attack.json.
"""

from __future__ import annotations

import json
import shlex
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from benchmarks.attack import plain, verdicts
from benchmarks.attack.plan import Plan, shares
from benchmarks.attack.siege import Siege
from benchmarks.attack.verdicts import Delays
from benchmarks.load.report import table
from benchmarks.load.server import Server
from benchmarks.load.workloads import own_prompts
from d2sd.cli.options import FilePath
from d2sd.cli.report import Reporting
from d2sd.errors import D2SDError
from d2sd.io import read_text, write_text
from tools.hostile.case import Kind, Scene

#: Tokens of an honest answer, and questions of the honest clients before a server that replaces another is attacked.
_TOKENS, _REPLACED = 8, 12
#: Parts of the result that are not printed as they are.
_LONG = ("classes", "memory", "faults")


def attack(plan: Plan, wanted: list[tuple[Kind, int]]) -> dict[str, Any]:
    """The whole attack; the result, whose `faults` must be empty."""
    scene = scene_of(plan)
    bodies = [
        {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": _TOKENS}
        for text in own_prompts(24)
    ]
    sieges, quiet, left = list[Siege](), Delays(), wanted
    while left:
        with Siege(plan, scene, bodies, len(sieges)) as siege:
            calm = siege.calm(_REPLACED if sieges else plan.quiet)
            quiet = quiet if sieges else calm
            sieges.append(siege)
            sound = True
            while left and sound:
                (kind, count), *left = left
                sound = siege.attack(kind, count)
                click.echo(f"{kind.name}: {Counter(one.outcome for one in siege.phases[-1].sent)}", err=True)
            siege.end(sound)
    faults = [fault for siege in sieges for fault in siege.faults]
    phases = [phase for siege in sieges for phase in siege.phases]
    overall = judge_delays(plan, sieges, quiet)
    compared, different = compare(plan, sieges, bodies)
    faults += [fault for phase in phases for fault in phase.faults] + overall + different
    return {
        "seed": plan.seed,
        "servers": len(sieges),
        "quiet": asdict(quiet),
        "limit_s": allowed(plan, quiet),
        "under_attack": asdict(
            Delays.of([visit for phase in phases if not phase.kind.fills for visit in phase.visits])
        ),
        "every_class": asdict(Delays.of([visit for phase in phases for visit in phase.visits])),
        "answers_compared": compared,
        "honest_answers": sum(visit.complete for siege in sieges for visit in siege.visits),
        "honest_refused": sum(visit.refused for siege in sieges for visit in siege.visits),
        "memory": [siege.memory() for siege in sieges],
        "classes": [phase.row() for phase in phases],
        "faults": faults,
    }


def scene_of(plan: Plan) -> Scene:
    """Reads the bundle's sizes."""
    config = json.loads(read_text(plan.bundle / "target" / "config.json"))
    manifest = json.loads(read_text(plan.bundle / "manifest.json"))
    return Scene(config["vocab_size"], manifest["recipe"]["limits"]["max_context"])


def allowed(plan: Plan, quiet: Delays) -> float:
    """Seconds that an honest client may wait for its first token.

    On a machine so busy that they wait longer without an attack, their quiet p99: such a run proves less.
    """
    return max(plan.slowdown * quiet.p50, quiet.p99)


def judge_delays(plan: Plan, sieges: list[Siege], quiet: Delays) -> list[str]:
    """Give every phase its honest clients and judge their delays; the faults of the whole attack."""
    limit, judged = allowed(plan, quiet), []
    for siege in sieges:
        for phase in siege.phases:
            phase.visits = verdicts.during(siege.visits, phase.begin, phase.end)
            bound = max(limit, plan.timeout) if phase.kind.fills else limit
            phase.faults += verdicts.of_class(phase.kind.name, Delays.of(phase.visits), bound)
            judged += [] if phase.kind.fills else phase.visits
    return verdicts.of_delays("the whole attack", Delays.of(judged), limit) if judged else []


def compare(plan: Plan, sieges: list[Siege], bodies: list[dict[str, Any]]) -> tuple[int, list[str]]:
    """Compare all answers with those of a server that decodes plainly: their number, and the faults."""
    with Server.start(plan.bundle, plan.out / "plain.log", plain.PLAIN) as server:
        texts = plain.texts(server, bodies)
        faults = [fault for siege in sieges for fault in verdicts.of_visits(siege.visits, texts)]
        sent = [one for siege in sieges for phase in siege.phases for one in phase.sent]
        compared, different = plain.compare(server, sent, 300)
    return compared, faults + different


@click.command(cls=Reporting)
@click.argument("bundle", type=FilePath)
@click.option("--out", type=FilePath, required=True, help="Folder of the results.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--malformed", type=click.IntRange(0), default=5000, show_default=True, help="Malformed requests.")
@click.option("--expensive", type=click.IntRange(0), default=300, show_default=True, help="Expensive requests.")
@click.option("--only", multiple=True, help="Send this class alone; repeatable.")
@click.option(
    "--quiet", type=click.IntRange(4), default=200, show_default=True, help="Honest requests before the attack."
)
@click.option("--slowdown", type=float, default=3.0, show_default=True, help="Honest p99 over their quiet median.")
@click.option("--growth", type=float, default=1.2, show_default=True, help="Memory over that at the start.")
@click.option("--most-memory", type=float, default=4.0, show_default=True, help="GiB; a server with more is killed.")
@click.option("--timeout", type=float, default=30.0, show_default=True, help="Seconds of a request.")
@click.option("--seconds", type=float, default=60.0, show_default=True, help="Seconds of a class.")
@click.option("--serve", default="", help="More options of `d2sd serve`, as one text.")
def main(
    bundle: Path,
    out: Path,
    malformed: int,
    expensive: int,
    only: tuple[str, ...],
    most_memory: float,
    serve: str,
    **plan: Any,
) -> None:
    """Attack a server of BUNDLE. Exits with an error if anything was wrong."""
    out.mkdir(parents=True, exist_ok=True)
    made = Plan(bundle, out, most_memory=int(most_memory * (1 << 30)), options=tuple(shlex.split(serve)), **plan)
    result = attack(made, shares(expensive, malformed, only))
    write_text(out / "attack.json", json.dumps(result, indent=1) + "\n")
    click.echo(table([one | {"faults": len(one["faults"])} for one in result["classes"]]))
    click.echo(json.dumps({name: value for name, value in result.items() if name not in _LONG}, indent=1))
    click.echo(f"{sum(one['sent'] for one in result['classes'])} requests sent, {len(result['faults'])} faults")
    if result["faults"]:
        for fault, count in Counter(result["faults"]).most_common(60):
            click.echo(f"{count:4} x {fault}")
        raise D2SDError("The server has failed.", where=out / "attack.json", found=f"{len(result['faults'])} faults")


if __name__ == "__main__":
    main()
