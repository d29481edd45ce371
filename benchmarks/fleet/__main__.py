"""A fleet of 1 to 64 workers, by simulation with step costs measured on this machine.

    python -m benchmarks.fleet bundles/smollm2-135m --out build/fleet

First it measures the costs of a step (`benchmarks.fleet.profile`), then it runs the engine and the simulation on the
same requests and reports the difference, then it simulates: fleets of growing size under the same load for each worker,
each of them again with one worker killed, and the three routers on prompts that share prefixes. What is measured is
saved, so an interrupted run resumes.
"""

from __future__ import annotations

from pathlib import Path

import click

from benchmarks.fleet import report
from benchmarks.fleet.profile import profile
from benchmarks.fleet.replayed import Check, check
from benchmarks.fleet.routing import ROUTER_MODES
from benchmarks.fleet.sweep import SHARE, Results, Sweep
from d2sd.bench.provenance import provenance
from d2sd.bundle.load import load_bundle
from d2sd.cli.options import FilePath
from d2sd.cli.report import Reporting
from d2sd.errors import D2SDError
from d2sd.extras import require_plots
from d2sd.io import write_text
from d2sd.option_types import Listed
from d2sd.progress import bar
from d2sd.recipe import Policy
from d2sd.runtime.request import Limits
from d2sd.schema import read_model


@click.command(cls=Reporting)
@click.argument("bundle", type=FilePath)
@click.option("--out", type=FilePath, required=True, help="Folder of the results.")
@click.option("--policies", type=Listed(str), default="off,auto", show_default=True, help="Engines.")
@click.option("--workers", type=Listed(click.IntRange(1)), default="1,2,4,8,16,32,64", show_default=True)
@click.option("--concurrency", type=Listed(click.IntRange(1)), default="1,4,8", show_default=True, help="Of the check.")
@click.option("--requests", type=click.IntRange(1), default=8, show_default=True, help="Of the check.")
@click.option("--max-tokens", type=click.IntRange(1), default=32, show_default=True, help="Of the check.")
def main(
    bundle: Path, out: Path, policies: list[Policy], workers: list[int], concurrency: list[int], requests: int,
    max_tokens: int,
) -> None:  # fmt: skip
    """Measure BUNDLE's step costs, check the simulation against the engine, and simulate fleets."""
    require_plots()
    out.mkdir(parents=True, exist_ok=True)
    loaded = load_bundle(bundle, progress=bar)
    costs = profile(loaded, policies, out / "costs.json", progress=bar)
    checks = []
    for policy in policies:
        for count in concurrency:
            path = out / f"check-{policy}-{count}-{requests}-{max_tokens}.json"
            if not path.exists():
                found = check(loaded, policy, costs.engines[policy], count, requests, max_tokens)
                write_text(path, found.model_dump_json(indent=1))
            checks.append(read_model(Check, path, error=D2SDError, what="finished check", fix="delete it"))
    limits = Limits.of(loaded.recipe.limits)
    pages = limits.max_batch * limits.pages_for(limits.max_context + loaded.recipe.tree.block_size)
    sweep = Sweep(costs, limits, pages)
    rate = SHARE * sweep.saturated("off")
    cells = []
    with bar("simulating", len(policies) * len(workers)) as advance:
        for policy in policies:
            for count in workers:
                cells.append(sweep.cell(policy, count, rate))
                advance(1)
    routers = [sweep.routed(mode, rate / 4) for mode in ROUTER_MODES]
    made = provenance({"name": loaded.recipe.name}, "cpu")
    results = Results(provenance=made, costs=costs, checks=checks, limits=limits, cells=cells, routers=routers)
    write_text(out / "fleet.json", results.model_dump_json(indent=1) + "\n")
    write_text(out / "fleet.md", report.markdown(results))
    report.plot(results, out / "fleet.png")
    click.echo((out / "fleet.md").read_text("utf-8"))


if __name__ == "__main__":
    main()
