"""Tokens a second of every policy with SmolLM2's real pair, 1 to 32 requests in flight, and whether it is lossless.

Each policy has an engine in a process of its own (`endtoend_worker`). All of them compile and capture side by side;
then one after the other serves the same prompts, alone on the GPU, with 1, 2, 4, ... in flight, and all do so again
while time is left. Answers are compared with those of plain decoding of one request: in fp32 all must be equal, in
bf16 the share that is, and how near the two best logits were where one is not. transformers serves the same prompts.

What `gpu_pack.sh pack weights` packs is needed: the target, the drafters and the prompts.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu.brought import VARIABLE
from benchmarks.gpu.cases import Case, Note, Skip
from benchmarks.gpu.turns import turn

SETS = ("gsm8k", "humaneval", "mbpp", "mt_bench")
#: Bundle -> recipe and what is set in it.
BUNDLES = {
    "bf16": ("smollm2-135m", "precision=bf16"),
    "fp32": ("smollm2-135m", "precision=fp32"),
    "flex": ("smollm2-135m-flex", "precision=bf16"),
}
#: Method and nodes; plain decoding is what the others are compared with.
METHODS = (
    ("off", 1),
    ("chain", 8),
    ("ddtree", 64),
    ("d2sd", 64),
    ("hybrid", 64),
    ("auto", 64),
    ("hybrid+lookup", 64),
    ("auto+lookup", 64),
)
PROVEN = (("off", 1), ("chain", 8), ("ddtree", 64), ("d2sd", 64), ("hybrid", 64), ("reanchor", 64), ("auto+lookup", 64))
FLEX = (("off", 1), ("chain", 8), ("ddtree", 64))
#: What is timed, by name: a bundle and its policies.
SPEEDS = {"bf16": ("bf16", METHODS), "flexdraft": ("flex", FLEX)}
#: Where answers are equal or wrong: a bundle, its policies, and whether its steps are batch-invariant.
PROOFS = {"fp32": ("fp32", PROVEN, False), "exact": ("bf16", PROVEN, True), "flexdraft": ("flex", FLEX, True)}
#: In flight -> prompts, of 64.
FLIGHTS = {1: 16, 2: 32, 4: 32, 8: 64, 16: 64, 32: 64}
PROMPTS, TOKENS = 64, 128
#: The prompts of a dry run, which needs no sets.
DRY = ["The capital of France is", "def fibonacci(n):", "Once upon a time", "Water boils at"]
#: The same of transformers, which takes longer.
_PEERS = {1: 8, 8: 32, 32: 64}
#: fp32: prompts, tokens and requests in flight.
PROOF, PROOF_TOKENS, PROOF_FLIGHT = 48, 64, 8
#: Most seconds until a worker is ready, or has served.
_READY, _SERVED = 150.0, 90.0
#: Seconds that transformers may need, and of all rounds.
_PEER, _ROUNDS = 110.0, 100.0


def cases(out: Path, until: float) -> Iterator[Case]:
    yield "endtoend/bf16", partial(speeds, "bf16", out, until)


def proof_cases(out: Path, until: float) -> Iterator[Case]:
    """Cases that time nothing."""
    yield "proof/fp32", partial(proof, "fp32", out, until)


def exact_cases(out: Path, until: float) -> Iterator[Case]:
    """Answers of batch-invariant steps in bf16."""
    yield "proof_exact/bf16", partial(proof, "exact", out, until)


def flexdraft_cases(out: Path, until: float) -> Iterator[Case]:
    yield "flexdraft/proof", partial(proof, "flexdraft", out, until)
    yield "flexdraft/bf16", partial(speeds, "flexdraft", out, until)


def bundle_cases(out: Path, until: float) -> Iterator[Case]:
    """Cases that need no GPU: bundles may be built while it is busy."""
    yield "bundles/all", partial(build, out, until)


class Child:
    """A worker's process."""

    def __init__(self, module: str, given: dict[str, Any], log: Path, *, own_triton: bool = False) -> None:
        self.log = log.open("w")
        path = [one for one in sys.path if one and not (own_triton and one == os.environ.get(VARIABLE))]
        self.process = subprocess.Popen(
            [sys.executable, "-m", f"benchmarks.gpu.{module}", json.dumps(given)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"},
        )

    def ask(self, seconds: float, **line: Any) -> dict[str, Any]:
        """Send this line; returns the answer to it."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(line) + "\n")
            self.process.stdin.flush()
        except OSError:
            return {"error": f"it has ended: see {self.log.name}"}
        return self.hear(seconds)

    def hear(self, seconds: float) -> dict[str, Any]:
        """The next line that begins with @, or why there is none."""
        assert self.process.stdout is not None
        end = time.time() + seconds
        while (left := end - time.time()) > 0:
            if select.select([self.process.stdout], [], [], left)[0]:
                line = self.process.stdout.readline()
                if not line:
                    return {"error": f"it ended with {self.process.wait()}: see {self.log.name}"}
                if line.startswith("@"):
                    return json.loads(line[1:])  # type: ignore[no-any-return]
        self.close()
        return {"error": f"no answer in {seconds:.0f} s"}

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.log.close()


def build(out: Path, until: float, note: Note, *, collect: bool = False) -> dict[str, Any]:
    """All bundles side by side, and the token ids of the prompts."""
    begun, found = time.time(), {}
    command = [sys.executable, "-c", "from d2sd.cli.main import main; main()", "build"]
    more = ["--set", "limits.prefill_chunk=512", "--set", "limits.max_batch=32"]
    # The GPU answers more below: on 16 slow cores, checks of 4 answers took both builds more than two minutes.
    more += ["--set", "checks.count=1", "--set", "checks.tokens=2", "--set", "checks.fit=warn"]
    few = os.environ | {"OMP_NUM_THREADS": "4"}
    running = {}
    for name, (recipe, setting) in BUNDLES.items():
        folder = out / f"bundle-{name}"
        if not (folder / "manifest.json").exists():
            log = (out / f"build-{name}.log").open("w")
            given = [*command, f"recipes/{recipe}.yaml", *more, "--set", setting, "--out", str(folder)]
            running[name] = subprocess.Popen(given, stdout=log, stderr=subprocess.STDOUT, env=few)
    for name, process in running.items():
        found[name] = process.wait(timeout=max(1.0, until - time.time()))
        if name == "bf16" and not found[name]:
            sets = DRY if collect else prompts(PROMPTS)
            (out / "requests.json").write_text(json.dumps(encoded(out / "bundle-bf16", sets)))
    note(build_s=time.time() - begun)
    if any(found.values()):
        raise RuntimeError(f"a build failed: {found}; see build-*.log")
    return {}


def prompts(count: int) -> list[str]:
    """Take equally many of each set, one of each in turn."""
    from d2sd.prompts import read_prompts

    if not Path("data/eval").exists():
        raise Skip("no prompts in data/eval: gpu_pack.sh pack weights")
    sets = [[text for _, text in read_prompts(Path(f"data/eval/{name}.jsonl"))] for name in SETS]
    return [text for four in zip(*sets, strict=False) for text in four][:count]


def encoded(bundle: Path, texts: Sequence[str]) -> dict[str, Any]:
    """Token ids in the target's chat template, and its stop tokens."""
    from d2sd.bundle.load import load_bundle
    from d2sd.bundle.requests import chat_request
    from d2sd.runtime.sampling_params import SamplingParams

    loaded = load_bundle(bundle, verify=False)
    requests = [chat_request(loaded, text, SamplingParams(), 1) for text in texts]
    return {"ids": [list(one.prompt) for one in requests], "stop": sorted(loaded.stop_token_ids)}


def started(
    out: Path, bundle: str, methods: Sequence[tuple[str, int]], *, collect: bool, **more: bool
) -> dict[str, Child]:
    """A worker for each method, all of them compiling, by name; `more` of what `endtoend_worker` reads."""
    given: dict[str, Any] = {
        "bundle": str(out / f"bundle-{bundle}"),
        "requests": str(out / "requests.json"),
        "device": "cpu" if collect else "cuda",
        "most": 2 if collect else max(FLIGHTS),
    }
    found = {}
    for method, nodes in methods:
        name, kind = named(method, nodes), "-exact" if more["exact"] else ""
        log = out / f"worker-{bundle}{kind}-{name.replace(' ', '-')}.log"
        found[name] = Child("endtoend_worker", given | more | {"method": method, "nodes": nodes}, log)
    return found


def named(method: str, nodes: int) -> str:
    """A method and the size of its trees."""
    return f"{method} {nodes}" if nodes > 8 else method


def speeds(kind: str, out: Path, until: float, note: Note, *, collect: bool = False) -> dict[str, Any]:
    """Tokens a second in bf16, by method and requests in flight; all rounds, and the milliseconds of steps."""
    bundle, methods = SPEEDS[kind]
    if collect:
        methods = (methods[0], methods[-1])
    children: dict[str, Child] = {}
    rows: dict[str, Any] = {}
    try:
        with turn(alone=False):
            begun, ready = time.time(), {}
            children |= started(out, bundle, methods, collect=collect, sampled=False, exact=False)
            if kind == "bf16" and not collect:
                given = {"bundle": str(out / "bundle-bf16"), "requests": str(out / "requests.json"), "device": "cuda"}
                children["transformers"] = Child("endtoend_peer", given, out / "worker-peer.log", own_triton=True)
            for name, child in children.items():
                most = _PEER if name == "transformers" else _READY
                ready[name] = child.hear(max(1.0, begun + most - time.time()))
            note(ready=ready, ready_s=time.time() - begun)
        if collect and any("error" in one for one in ready.values()):
            raise RuntimeError(f"a worker did not start: {ready}")
        with turn(alone=True) as waited:
            note(waited_s=waited)
            gaps = _rounds(children, ready, rows, min(until, time.time() + _ROUNDS), note, collect=collect)
    finally:
        for child in children.values():
            child.close()
    return {"ready": ready, "methods": rows, "gaps": gaps}


def _rounds(
    children: dict[str, Child],
    ready: dict[str, dict[str, Any]],
    rows: dict[str, Any],
    until: float,
    note: Note,
    *,
    collect: bool,
) -> object:
    """Let one after the other serve, twice if there is time, into `rows`; gives the gaps where bf16 differs."""
    flights, tokens = ({1: 1, 2: 2}, 6) if collect else (FLIGHTS, TOKENS)
    reference: dict[int, list[int]] = {}
    for _ in range(2):
        round_began = time.time()
        for name, child in children.items():
            is_peer = name == "transformers"
            if is_peer and name in rows:  # once
                continue
            asked = {str(n): count for n, count in (_PEERS if is_peer else flights).items()}
            if "error" in ready[name] or time.time() > until - 15:
                continue
            seconds = min(_SERVED, max(5.0, until - time.time()))
            answer = child.ask(seconds, do="flights", at=asked, tokens=tokens)
            row = rows.setdefault(name, {"rounds": []})
            if "error" in answer:
                row["error"] = answer["error"]
                continue
            row["device_ms"] = answer["device_ms"]
            row["rounds"].append([_served(found, reference) for found in answer["result"]])
            note(methods=rows)
        if time.time() + (time.time() - round_began) > until:
            break
    flights_of = [one for row in rows.values() for flight in row["rounds"] for one in flight]
    found = [(p, tuple(tokens)) for one in flights_of for p, tokens in one.pop("different", [])]
    different = list(dict.fromkeys(found))[:80]
    gaps = children["off"].ask(40, do="gaps", cases=different) if different and not collect else {"result": []}
    return gaps.get("result", gaps)


def _served(found: dict[str, Any], reference: dict[int, list[int]]) -> dict[str, Any]:
    """Compare a flight's answers with the first ones seen: plain decoding's, with one in flight where that answered
    the prompt.
    """
    answers = found.pop("answers", [])
    for prompt, answer in enumerate(answers):
        reference.setdefault(prompt, answer)
    places = [_first(answer, reference[prompt]) for prompt, answer in enumerate(answers)]
    found["equal"] = sum(place is None for place in places)
    found["answers"] = len(answers)
    found["different"] = [[p, reference[p][:at]] for p, at in enumerate(places) if at is not None]
    if "seconds" in found:
        found["tokens_per_s"] = found["tokens"] / found["seconds"]
    return found


def _first(answer: Sequence[int], expected: Sequence[int]) -> int | None:
    """Place of the first token that differs."""
    if list(answer) == list(expected):
        return None
    both = zip(answer, expected, strict=False)
    return next((place for place, (a, b) in enumerate(both) if a != b), min(len(answer), len(expected)))


def proof(kind: str, out: Path, until: float, note: Note, *, collect: bool = False) -> dict[str, Any]:
    """Answers that differ from plain decoding's of one request, at T = 0 and T = 1; raises where one does."""
    bundle, methods, exact = PROOFS[kind]
    count, tokens = PROOF, PROOF_TOKENS
    found: dict[str, Any] = {"compared": 0, "different": {}, "errors": {}}
    if collect:
        methods, count, tokens = (methods[0], methods[-1]), 2, 6
    with turn(alone=False):
        children = started(out, bundle, methods, collect=collect, sampled=True, exact=exact)
        _compare(children, count, tokens, found, note, collect=collect)
    if found["different"]:
        raise RuntimeError(f"answers differ: {found['different']}")
    return found


def _compare(
    children: dict[str, Child], count: int, tokens: int, found: dict[str, Any], note: Note, *, collect: bool
) -> None:
    """Fill `found` with what differs, at T = 0 and T = 1."""
    try:
        begun = time.time()
        for name, child in children.items():
            answer = child.hear(max(5.0, begun + _READY - time.time()))
            found["errors"] |= {name: answer["error"]} if "error" in answer else {}
        off = children["off"]
        for heat in (0.0, 1.0):
            asked = {"do": "answers", "temperature": heat, "count": count, "tokens": tokens}
            plain = off.ask(_SERVED, **asked, in_flight=1).get("result")
            if plain is None:
                raise RuntimeError("plain decoding did not answer")
            for name, child in children.items():
                if name in found["errors"]:
                    continue
                answer = child.ask(_SERVED, **asked, in_flight=2 if collect else PROOF_FLIGHT)
                if "error" in answer:
                    found["errors"][name] = answer["error"]
                    continue
                wrong = [p for p, (a, b) in enumerate(zip(answer["result"], plain, strict=True)) if a != b]
                found["compared"] += len(plain)
                if wrong:
                    found["different"][f"{name} T={heat:g}"] = wrong
                note(**found)
    finally:
        for child in children.values():
            child.close()
