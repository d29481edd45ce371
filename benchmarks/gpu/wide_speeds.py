"""Tokens a second of SmolLM2's pair, widened to the sizes of Qwen3-8B and Qwen3-32B, by policy and requests in flight.

At its own size a step of this pair is launches. At these a step is reading weights, as for users, and the pair's
answers and acceptance are what they are: `benchmarks.gpu.wide`. Drafters are in bf16, and in FP8 behind a bf16 target
("mixed"), with the input scales that a build of the recipe with `fp8: {target: false}` found; "mixed-16" has the same
weights draft blocks of 16 in place of 8. Each size is a process of its own: both make their engines beside other
processes, and each then has the GPU alone.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.cases import Case, Note
from benchmarks.gpu.endtoend import TOKENS, named
from benchmarks.gpu.endtoend_worker import Worker
from benchmarks.gpu.turns import turn
from benchmarks.gpu.wide import SIZES, Size, widened
from d2sd.bundle.load import Bundle, load_bundle
from d2sd.modeling.fp8 import round_to_fp8

#: Kind of drafters, method and nodes, in the order in which they are timed.
_METHODS = (
    ("bf16", "off", 1),
    ("mixed", "ddtree", 64),
    ("mixed", "hybrid", 64),
    ("mixed-16", "ddtree", 64),
    ("mixed-16", "hybrid", 64),
    ("mixed", "auto", 64),
    ("mixed", "chain", 8),
    ("mixed", "d2sd", 64),
    ("bf16", "ddtree", 64),
    ("bf16", "hybrid", 64),
    ("mixed-16", "ddtree", 128),
    ("mixed-16", "hybrid", 128),
    ("mixed", "ddtree+lookup", 64),
    ("mixed", "hybrid+lookup", 64),
)
METHODS = {"8b": _METHODS, "32b": tuple(one for one in _METHODS[:-2] if one[1] != "auto")}
PLAIN = "bf16 off"
#: Requests in flight -> prompts, and tokens of context that an engine has room for.
FLIGHTS, CONTEXT = {"8b": {1: 16, 4: 32}, "32b": {1: 12, 2: 8}}, 1024
#: More of them, of those that serve at load.
LOADED, AT_LOAD = {16: 32}, {"8b": ("off", "auto"), "32b": ()}
#: Rounds, while there is time: two tell how far a figure is to be trusted.
_ROUNDS = 2
#: Dry, on a CPU.
_SMALL = Size(640, 1600, 15, 5, 31, 5)
#: Input scale of each layer of each drafter, by the drafter's folder.
SCALES = Path(__file__).with_name("fp8_inputs.json")


def cases(name: str) -> Callable[[Path, float], Iterator[Case]]:
    """The cases of one size."""

    def of_size(out: Path, until: float) -> Iterator[Case]:
        yield f"wide_{name}/mixed", partial(speeds, name, out, until)

    return of_size


cases_8b, cases_32b = map(cases, METHODS)


def flights_of(name: str, method: str) -> dict[int, int]:
    """Requests in flight at this size -> prompts."""
    return FLIGHTS[name] | (LOADED if method in AT_LOAD[name] else {})


def rounded(bundle: Bundle) -> Bundle:
    """The bundle with FP8 drafters."""
    drafters, scales = dict(bundle.drafters), json.loads(SCALES.read_text("utf-8"))
    for role, drafter in drafters.items():
        drafters[role] = deepcopy(drafter)
        round_to_fp8(drafters[role], scales[role.folder])
    return replace(bundle, drafters=drafters)


def bundles(folder: Path, size: Size, device: str) -> dict[str, Bundle]:
    """The widened pair with drafters of both kinds; one target."""
    loaded = load_bundle(folder, verify=False)
    limits = loaded.recipe.limits.model_copy(update={"max_context": CONTEXT})
    recipe = loaded.recipe.model_copy(update={"limits": limits})
    small = replace(loaded, manifest=loaded.manifest.model_copy(update={"recipe": recipe}))
    wide, narrow = widened(small, size, device), rounded(small)
    mixed = {
        kind: widened(narrow, size, device, wide.target, block) for kind, block in (("mixed", None), ("mixed-16", 16))
    }
    return {"bf16": wide, **mixed}


def speeds(name: str, out: Path, until: float, note: Note, *, collect: bool = False) -> dict[str, Any]:
    """Tokens a second, tokens a step, and milliseconds of captured steps, by kind, method and requests in flight."""
    device, size, methods = "cuda", SIZES[name], METHODS[name]
    if collect:
        device, size, methods = "cpu", _SMALL, (("bf16", "off", 1), ("mixed-16", "hybrid", 64))
    begun = time.time()
    workers, failed = dict[str, tuple[Worker, dict[str, int]]](), {}
    with turn(alone=False):
        made = bundles(out / "bundle-bf16", size, device)
        note(widened_s=time.time() - begun, parameters=sum(p.numel() for p in made["bf16"].target.parameters()))
        for kind, method, nodes in methods:
            key, flights = f"{kind} {named(method, nodes)}", {1: 1} if collect else flights_of(name, method)
            given = {"requests": str(out / "requests.json"), "device": device, "most": max(flights), "sampled": False}
            try:
                worker = Worker(given | {"method": method, "nodes": nodes}, made[kind])
                workers[key] = worker, {str(n): count for n, count in flights.items()}
            except Exception as error:
                failed[key] = f"{type(error).__name__}: {error}"[:300]
        note(ready_s=time.time() - begun, failed=failed)
    rows: dict[str, Any] = {}
    plain: dict[int, list[int]] = {}
    for _ in range(1 if collect else _ROUNDS):
        with turn(alone=True) as waited:
            note(waited_s=waited)
            for key, (worker, asked) in workers.items():
                if time.time() > until - 10:
                    break
                found = worker.flights(asked, 6 if collect else TOKENS)
                for one in found:
                    mine = one.pop("answers")
                    if key == PLAIN:
                        plain = dict(enumerate(mine)) | plain
                    same = [answer == plain.get(prompt) for prompt, answer in enumerate(mine)]
                    one |= {"equal": sum(same), "answers": len(same), "tokens_per_s": one["tokens"] / one["seconds"]}
                rows.setdefault(key, {"rounds": []})["rounds"].append(found)
                rows[key]["device_ms"] = worker.device_ms
                note(methods=rows)
        time.sleep(1)  # others go first
    if collect and failed:
        raise RuntimeError(f"engines were not made: {failed}")
    return {"methods": rows, "failed": failed, "memory_gb": torch.cuda.max_memory_allocated() / 1e9}
