"""How fast is the server, and what do speculation and the prefix cache change under load?

Starts a server once for each policy and once without the prefix cache, all at the same time, and measures every load
on each in turn, so that a slow period of the machine affects what is compared alike. Before any time is taken, answers
of every server are compared with those of `LLM(...)` for the same seeds, and so are all answers of `prompts` and
`poisson`. Every finished run is saved: an interrupted benchmark resumes.

    python -m benchmarks.serving bundles/smollm2-135m --out build/serving

`--face triton` asks a Triton server over decoupled gRPC streams, `--face dynamo` Dynamo's frontend with one worker, in
the environments of `make triton-test` and `make dynamo-test`.

Loads: `prompts` keeps a number of requests in flight (closed loop), `poisson` sends requests at random times of a
given rate (open loop), `prefix` has a system prompt that all requests share, `turns` are chats that send their history.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import click
from pydantic import BaseModel

from benchmarks.load import direct, report, workloads
from benchmarks.load.answers import check_answers, compare, plain_answers
from benchmarks.load.faces import FACES
from benchmarks.load.figures import Sample, Slo
from benchmarks.load.plots import write_plots
from benchmarks.load.result import Cell, Key, Result, Run, Variant, Workload
from benchmarks.load.server import Server
from benchmarks.load.traffic import closed_loop, open_loop
from benchmarks.load.workloads import Conversation
from d2sd.bench.provenance import provenance
from d2sd.bench.result import save
from d2sd.cli.options import FilePath
from d2sd.cli.report import Reporting
from d2sd.convert.checkpoint.offline import load_tokenizer
from d2sd.errors import D2SDError
from d2sd.extras import require_plots
from d2sd.io import write_text
from d2sd.option_types import Listed
from d2sd.progress import bar
from d2sd.schema import read_model


@dataclass
class Benchmark:
    """One run of the benchmark."""

    bundle: Path
    out: Path
    url: str | None
    options: tuple[str, ...]  # of every server
    settings: dict[str, Any]
    slo: Slo
    repeat: int
    servers: dict[Variant, Server] = field(default_factory=dict)
    answers: list[str] = field(default_factory=list)  # to the requests of `prompts` and `poisson`, by plain decoding
    tokenizer: Any = None

    @property
    def _kind(self) -> type[Server]:
        return FACES[self.settings["face"]].server

    def keys(self) -> list[Key]:
        """Keys of results that are compared side by side."""
        settings = self.settings
        policies = [Variant(policy, True) for policy in settings["policies"]]
        caches = [Variant(settings["policies"][-1], cached) for cached in (False, True)]
        if self.url is not None:
            policies = caches = policies[:1]
        elif settings["face"] != "serve":
            caches = caches[-1:]  # what the cache saves is the engine's, the same behind every face
        loads: list[tuple[Workload, list[float], list[Variant]]] = [
            ("prompts", settings["concurrency"], policies),
            ("poisson", settings["rates"], policies),
            ("prefix", [8], caches),
            ("turns", [4], caches),
        ]
        return [
            Key(variant, workload, amount)
            for workload, amounts, variants in loads
            if workload in settings["workloads"]
            for amount in amounts
            for variant in variants
        ]

    def run(self) -> Result:
        """Measure what is missing; the result of everything."""
        keys = self.keys()
        wanted = [(key, number) for number in range(self.repeat) for key in keys]
        missing = [(key, number) for key, number in wanted if not self._path(key, number).exists()]
        with ExitStack() as stack, bar("loads", len(missing)) as advance:
            self._start(stack, {key.variant for key, _ in missing})
            for key, number in missing:
                run = asyncio.run(self._measure(key, number))
                write_text(self._path(key, number), run.model_dump_json())
                advance(1)
        cells = [Cell.of(key, [self._saved(key, number) for number in range(self.repeat)], self.slo) for key in keys]
        bundle = {"name": self.bundle.resolve().name, "manifest": self._fingerprint}
        return Result(provenance=provenance(bundle, "cpu"), settings=self.settings, slo=self.slo, cells=cells)

    def _start(self, stack: ExitStack, variants: set[Variant]) -> None:
        for variant in sorted(variants):
            if self.url is not None:
                server = self._kind(self.url, self.bundle)
            else:
                log = self.out / f"server-{re.sub('[^a-z]+', '-', str(variant))}.log"
                server = self._kind.start(self.bundle, log, [*variant.options, *self.options])
            self.servers[variant] = stack.enter_context(server)
        check_answers(self.bundle, list(self.servers.values()))

    async def _measure(self, key: Key, number: int) -> Run:
        server = self.servers[key.variant]
        conversations = self._conversations(key.workload, number)
        before = server.cpu_seconds()
        async with server.connect() as client:
            if key.workload == "poisson":
                replies, seconds = await open_loop(client, conversations, key.amount, seed=number)
            else:
                replies, seconds = await closed_loop(client, conversations, int(key.amount))
        after = server.cpu_seconds()
        if key.workload in ("prompts", "poisson"):
            if not self.answers:
                self.answers = plain_answers(self.bundle, conversations)
            compare(replies, self.answers, str(key))
        spent = None if before is None or after is None else after - before
        return Run(samples=[Sample.of(reply) for reply in replies], seconds=seconds, cpu_seconds=spent)

    def _conversations(self, workload: Workload, number: int) -> list[Conversation]:
        settings = self.settings
        parameters = {"temperature": settings["temperature"], "max_tokens": settings["max_tokens"]}
        if workload == "prefix":
            parameters["max_tokens"] = settings["prefix_max_tokens"]
            count, tokens = settings["prefix_requests"], settings["prefix_tokens"]
            return workloads.shared_prefix(count, parameters, tokens, self._count, number)
        if workload == "turns":
            return workloads.multi_turn(settings["chats"], parameters, settings["turns"], number)
        return workloads.single(settings["requests"], parameters)

    def _count(self, text: str) -> int:
        if self.tokenizer is None:
            self.tokenizer = load_tokenizer(self.bundle / "target")
        return len(self.tokenizer(text).input_ids)

    @property
    def _fingerprint(self) -> str:
        return hashlib.sha256((self.bundle / "manifest.json").read_bytes()).hexdigest()[:16]

    def _path(self, key: Key, number: int) -> Path:
        """File of a run; its folder depends on all that a run depends on."""
        lists = ("concurrency", "rates", "workloads", "policies")
        settings = {name: value for name, value in self.settings.items() if name not in lists}
        inputs = json.dumps([self._fingerprint, settings, self.options, self.url])
        folder = self.out / "parts" / hashlib.sha256(inputs.encode()).hexdigest()[:12]
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{re.sub('[^a-z0-9.]+', '-', str(key))}-{number}.json"

    def _saved(self, key: Key, number: int) -> Run:
        return read_model(Run, self._path(key, number), error=D2SDError, what="finished run", fix="delete it")


def _write(path: Path, found: Sequence[BaseModel]) -> None:
    """Write a list of results as JSON and as a Markdown table."""
    rows = [one.model_dump() for one in found]
    write_text(path.with_suffix(".json"), json.dumps(rows, indent=1) + "\n")
    text = report.table(rows)
    write_text(path.with_suffix(".md"), text)
    click.echo(text)


def paths(result: Result, out: Path) -> Iterator[Path]:
    """Write serving.json, serving.md and the plots."""
    save(result, out / "serving.json", indent=1)
    write_text(out / "serving.md", report.markdown(result))
    yield from (out / "serving.json", out / "serving.md", *write_plots(result, out))


@click.command(cls=Reporting)
@click.argument("bundle", type=FilePath)
@click.option("--out", type=FilePath, required=True, help="Folder of the results.")
@click.option("--face", type=click.Choice(list(FACES)), default="serve", show_default=True, help="Kind of server.")
@click.option("--url", help="A server that runs already; nothing is compared then.")
@click.option("--server-option", "options", multiple=True, help="Passed on to the server; repeatable.")
@click.option("--workloads", type=Listed(click.Choice(get_args(Workload))), default="prompts,poisson,prefix,turns")
@click.option("--policies", type=Listed(str), default="off,auto", show_default=True, help="One server for each.")
@click.option("--concurrency", type=Listed(click.IntRange(1)), default="1,2,4,8,16", show_default=True)
@click.option("--rates", type=Listed(click.FloatRange(0, min_open=True)), default="0.5,1,2", show_default=True)
@click.option("--requests", type=click.IntRange(1), default=32, show_default=True, help="Of `prompts` and `poisson`.")
@click.option("--max-tokens", type=click.IntRange(1), default=64, show_default=True)
@click.option("--temperature", type=click.FloatRange(0), default=0.0, show_default=True)
@click.option("--prefix-requests", type=click.IntRange(1), default=64, show_default=True)
@click.option("--prefix-tokens", type=click.IntRange(1), default=1000, show_default=True)
@click.option("--prefix-max-tokens", type=click.IntRange(1), default=16, show_default=True)
@click.option("--chats", type=click.IntRange(1), default=8, show_default=True)
@click.option("--turns", type=click.IntRange(1), default=4, show_default=True)
@click.option("--slo-ttft", type=click.FloatRange(0), default=1.0, show_default=True, help="Seconds.")
@click.option("--slo-itl", type=click.FloatRange(0), default=0.1, show_default=True, help="Seconds.")
@click.option("--repeat", type=click.IntRange(1), default=1, show_default=True, help="Runs of each load, in turn.")
@click.option("--overhead", is_flag=True, help="Instead: the server against the engine alone, 8 in flight.")
def main(
    bundle: Path,
    out: Path,
    url: str | None,
    options: tuple[str, ...],
    slo_ttft: float,
    slo_itl: float,
    repeat: int,
    overhead: bool,
    **settings: Any,
) -> None:
    """Measure a server of BUNDLE under load."""
    require_plots()  # now, not after hours of measuring
    out.mkdir(parents=True, exist_ok=True)
    requests, max_tokens = settings["requests"], settings["max_tokens"]
    if overhead:
        kind, policies = FACES[settings["face"]].server, settings["policies"]
        found = direct.measure_overhead(kind, bundle, out, policies, 8, requests, max_tokens, repeat)
        _write(out / "overhead", found)
        return
    result = Benchmark(bundle, out, url, options, settings, Slo(ttft=slo_ttft, itl=slo_itl), repeat).run()
    click.echo(report.markdown(result))
    for path in paths(result, out):
        click.echo(path)


if __name__ == "__main__":
    main()
