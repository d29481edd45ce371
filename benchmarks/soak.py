"""Does the server survive its clients? Mixed load, then SIGTERM while answers run.

For some minutes clients ask, disconnect, set deadlines, read slowly, send too much or nonsense, come in crowds and are
killed. Checked: every answer is that of plain decoding for its seed; every refusal is an error of the face's API;
memory is flat after the warm-up; no K/V page is in use when the server is idle; nothing but well-formed lines is in
its log; SIGTERM finishes the running answers. Writes soak.json and a plot of the memory.

    python -m benchmarks.soak bundles/smollm2-135m --minutes 10 --out build/soak

`--face triton` soaks a Triton server, over decoupled gRPC streams, and `--face dynamo` Dynamo's frontend with a worker.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

import click

from benchmarks.load.answers import reference
from benchmarks.load.faces import FACES, Face
from benchmarks.load.guests import Guests
from benchmarks.load.health import bad_lines, idle_pages
from benchmarks.load.server import Server
from d2sd.cli.options import FilePath
from d2sd.cli.report import Reporting
from d2sd.errors import D2SDError
from d2sd.extras import require_plots
from d2sd.io import write_text

#: Growth of the memory, from the third to the last fifth of the time, that is noise.
_NOISE = 0.02
#: Seconds between two looks at the memory.
_SAMPLE = 2.0


async def soak(server: Server, guests: Guests, seconds: float) -> list[tuple[float, int]]:
    """Run the load; returns (seconds since the start, resident bytes)."""
    memory, begun = [], time.monotonic()
    load = asyncio.ensure_future(guests.all())
    while time.monotonic() - begun < seconds and not load.done():
        memory.append((time.monotonic() - begun, server.resident_bytes()))
        await asyncio.sleep(_SAMPLE)
    guests.stopping = True
    await load
    return memory


def growth(memory: list[tuple[float, int]]) -> float:
    """Relative growth of the median from the third to the last fifth."""
    fifth = max(1, len(memory) // 5)
    values = [size for _, size in memory]
    early, late = median(values[2 * fifth : 3 * fifth] or values), median(values[-fifth:])
    return late / early - 1


async def terminate(server: Server, guests: Guests, count: int = 8) -> dict[str, Any]:
    """SIGTERM while answers run: they must end as they should, and new requests must be refused."""
    pairs = [guests.any() for _ in range(count)]
    running = [asyncio.ensure_future(guests.client.ask(body)) for body, _ in pairs]
    while (await asyncio.to_thread(server.metrics))["d2sd_num_requests_running"] < 1:
        await asyncio.sleep(0.01)
    exiting = asyncio.ensure_future(asyncio.to_thread(server.stop, 120))
    outcomes: Counter[str] = Counter()
    for (_, text), reply in zip(pairs, await asyncio.gather(*running, return_exceptions=True), strict=True):
        if isinstance(reply, BaseException):
            outcomes[f"fault: {type(reply).__name__}: {reply}"] += 1
            continue
        try:
            outcomes[guests.judge(reply, text, guests.leaving)] += 1
        except ValueError as error:
            outcomes[f"fault: {error}"] += 1
    code = await exiting
    return {"outcomes": dict(outcomes), "exit_code": code, "refuses_connections": not server.accepts()}


async def run(face: Face, bundle: Path, out: Path, seconds: float, pause: float, max_tokens: int) -> dict[str, Any]:
    """All parts; the result, whose `faults` must be empty."""
    answers = reference(bundle, 24, max_tokens)
    log = out / "server.log"
    with face.server.start(bundle, log, face.guests.options) as server:
        async with server.connect(connections=64) as client:
            guests = face.guests(server, client, answers, pause)
            memory = await soak(server, guests, seconds)
            pages = await idle_pages(server)
            terminated = await terminate(server, guests)
    faults = list(guests.faults)
    faults += [f"not released when idle: {pages}"] if any(pages.values()) else []
    faults += [f"in the log: {line[:300]}" for line in bad_lines(log, json_lines=face.json_log)]
    faults += [f"at SIGTERM: {name}" for name in terminated["outcomes"] if name.startswith("fault")]
    if terminated["outcomes"].get("right answer", 0) == 0 or not terminated["refuses_connections"]:
        faults.append(f"at SIGTERM: {terminated}")
    grown = growth(memory)
    if grown > _NOISE:
        faults.append(f"memory grew by {grown:.1%} after the warm-up")
    return {
        "minutes": seconds / 60,
        "outcomes": dict(sorted(guests.outcomes.items())),
        "memory_growth": grown,
        "memory_mib": [(round(at, 1), size >> 20) for at, size in memory],
        "sigterm": terminated,
        "faults": faults,
    }


def plot(memory: list[tuple[float, int]], path: Path) -> None:
    """Resident memory over time."""
    from d2sd.viz import plot_style as style

    figure, axes = style.panels(1, 1, 3.4)
    panel = axes[0][0]
    panel.plot([at / 60 for at, _ in memory], [size for _, size in memory], color=style.colour("hybrid"))
    panel.set(xlabel="minutes", ylabel="resident memory, MiB")
    panel.set_ylim(bottom=0)
    style.finish(
        figure, "Memory of the server under mixed load with disconnects, deadlines and malformed requests", path
    )


@click.command(cls=Reporting)
@click.argument("bundle", type=FilePath)
@click.option("--out", type=FilePath, required=True, help="Folder of the results.")
@click.option("--face", type=click.Choice(list(FACES)), default="serve", show_default=True, help="Kind of server.")
@click.option("--minutes", type=click.FloatRange(0, min_open=True), default=10.0, show_default=True)
@click.option(
    "--pause",
    type=click.FloatRange(0, min_open=True),
    default=0.2,
    show_default=True,
    help="Mean seconds between two requests of a client.",
)
@click.option("--max-tokens", type=click.IntRange(1), default=32, show_default=True)
def main(bundle: Path, out: Path, face: str, minutes: float, pause: float, max_tokens: int) -> None:
    """Soak a server of BUNDLE. Exits with an error if anything was wrong."""
    require_plots()  # now, not after the soak
    out.mkdir(parents=True, exist_ok=True)
    result = asyncio.run(run(FACES[face], bundle, out, 60 * minutes, pause, max_tokens))
    write_text(out / "soak.json", json.dumps(result, indent=1) + "\n")
    plot(result["memory_mib"], out / "memory.png")
    for name, count in result["outcomes"].items():
        click.echo(f"{count:7} {name}")
    click.echo(f"memory: {result['memory_growth']:+.2%}; SIGTERM: {result['sigterm']}")
    if result["faults"]:
        raise D2SDError("The server failed.", where=out / "soak.json", found="\n".join(result["faults"][:20]))


if __name__ == "__main__":
    main()
