"""Fills a cache of Triton for a GPU machine, without a GPU: compilers take half of the first minutes there.

    python -m benchmarks.gpu.compiled CACHE --key KEY [--bundle BUNDLE [--wide | --exact]]  # here, on meta tensors
    python -m benchmarks.gpu.compiled CACHE --key KEY --training TARGET  # the bundle in a training's work folder
    python -m benchmarks.gpu.compiled key                # by the Triton and the Python of that machine: its KEY
    python -m benchmarks.gpu.compiled relocate CACHE     # there: entries name their files by whole paths

Launches of the steps of `budgets`, and of engines of a bundle as `endtoend` makes them, are compiled for compute
capability 9.0 exactly as a launch compiles them. An entry's name hashes Triton's own files, among them its library,
which differs by Python: KEY is what `triton_key` says there. What an entry lacks is compiled there as ever.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from triton.runtime.jit import JITFunction  # type: ignore[import-untyped]

if TYPE_CHECKING:
    from d2sd.bundle.load import Bundle
    from d2sd.runtime.engine import Engine

    #: Of a bundle, by method, nodes, device and batch.
    MakeEngine = Callable[[Bundle, str, int, str, int], Engine]


def relocate(folder: Path) -> int:
    """Let the entries of a cache name their files where they are now; returns the number of entries."""
    groups = sorted(folder.glob("*/__grp__*.json"))
    for group in groups:
        found = json.loads(group.read_text())
        here = {name: str(group.parent / name) for name in found["child_paths"]}
        if here != found["child_paths"]:  # others may be reading what is right
            group.write_text(json.dumps(found | {"child_paths": here}))
    return len(groups)


#: Before anything is put in its place.
_LAUNCH = JITFunction.run


@contextmanager
def compiling(key: str, seen: Counter[str]) -> Iterator[None]:
    """Launches on the meta device compile for an H100, and run nothing."""
    from triton.runtime import cache  # type: ignore[import-untyped]

    from benchmarks.ahead_of_time import pretended

    begun = time.time()

    def compiled(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if not seen[kernel.__name__]:
            print(f"{time.time() - begun:6.0f} s {kernel.__name__}", file=sys.stderr)
        seen[kernel.__name__] += 1
        return _LAUNCH(kernel, *args, grid=grid, warmup=True, **options)

    with ExitStack() as stack:
        stack.enter_context(patch.object(cache, "triton_key", lambda: key))
        stack.enter_context(patch.object(JITFunction, "run", compiled))
        stack.enter_context(pretended(90, "cache"))
        yield


def fill_budgets(key: str, only: str) -> None:
    """Compile the kernels of the steps of `budgets`. A few layers are enough, but not one: 1 would be compiled in."""
    from dataclasses import replace

    from benchmarks.gpu import budgets, dry, steps

    seen: Counter[str] = Counter()
    small = replace(steps.BODY, num_layers=3)
    with (
        patch.object(steps, "BODY", small),
        patch.object(steps, "DRAFTER_LAYERS", 2),
        patch.object(steps, "FLEX_LAYERS", 2),
        patch.object(steps, "FEATURE_LAYERS", (0, 1, 0, 1, 0)),
    ):
        for name, measure in budgets.cases():
            if name.startswith(f"budgets/{only}") and "profile" not in name and "products" not in name:
                print(name, file=sys.stderr)
                with dry.nothing_runs(), compiling(key, seen):
                    measure(lambda **_: None, device="meta")  # type: ignore[call-arg]


def fill_products(key: str, seen: Counter[str]) -> None:
    """Compile our own products in the shapes of the models that were made last, for their choice at load."""
    import torch

    from benchmarks.gpu import dry, steps
    from d2sd.modeling.product_forms import forms
    from d2sd.runtime.product_times import _weights, products_of

    with dry.nothing_runs(), compiling(key, seen):
        for kind, drafted in (("bf16", None), ("mixed", 32768), ("fp8", 32768)):
            weights: dict[Any, Any] = {}
            for name in ("hybrid", "flex"):
                runner = steps.made(steps.Step(name, kind, drafted=drafted), "meta")
                weights |= {_weights(product).shape: _weights(product) for product in products_of(runner)}
            for each in weights.values():
                for rows in (1, 2, 16):
                    x = torch.empty(rows + 256, each.values.shape[1], dtype=each.values.dtype, device="meta")[:rows]
                    for form in forms(rows, each, (9, 0)):
                        if form.name.endswith("kernel"):
                            form.call(x, each)


def fill_engines(key: str, folder: Path, *, exact: bool) -> None:
    """Compile what engines of this bundle run for prompts and for greedy and sampled steps, up to 32 requests."""
    from benchmarks.gpu.endtoend import FLEX, METHODS
    from benchmarks.gpu.endtoend_worker import Worker, in_mode
    from d2sd.bundle.load import load_bundle
    from d2sd.modeling.drafters.flexdraft_config import FlexConfig

    bundle = in_mode(load_bundle(folder, verify=False), exact=exact)
    with_flex = any(isinstance(config, FlexConfig) for config in bundle.draft_configs.values())
    names = [named for named in (FLEX if with_flex else METHODS) if not named[0].startswith("auto")]
    if bundle.recipe.precision == "bf16" and not with_flex:
        names += [named for named in METHODS if named[0] == "auto+lookup"]
    with _on_meta(key):
        for method, nodes in names:
            print(f"{method} {nodes}", file=sys.stderr)
            _fill(bundle, Worker.engine_of, method, nodes, 32, sampled=True)


def fill_wide(key: str, folder: Path) -> None:
    """Compile what engines of this bundle, widened, run for prompts and for greedy steps."""
    from benchmarks.gpu.endtoend_worker import Worker
    from benchmarks.gpu.wide import SIZES
    from benchmarks.gpu.wide_speeds import METHODS, bundles, flights_of

    with _on_meta(key):
        for name, size in SIZES.items():
            made = bundles(folder, size, "meta")
            for kind, method, nodes in METHODS[name]:
                print(f"{name} {kind} {method} {nodes}", file=sys.stderr)
                _fill(made[kind], Worker.engine_of, method, nodes, max(flights_of(name, method)), sampled=False)


@contextmanager
def _on_meta(key: str) -> Iterator[None]:
    import torch

    from tests.runtime.meta_gpu import meta_gpu
    from tests.runtime.specialisations import Specialisations

    on_meta = patch("d2sd.bundle.backends.check_device", lambda device: None)
    with meta_gpu(Specialisations()), compiling(key, Counter()), torch.inference_mode(), on_meta:
        yield


def _fill(bundle: Bundle, make: MakeEngine, method: str, nodes: int, most: int, *, sampled: bool) -> None:
    """Let an engine with recorded captures make its steps; `auto` chooses nothing here, but has all its policies."""
    from d2sd.bundle.serving import auto_policies, candidate_policies
    from d2sd.modeling.where import Where
    from d2sd.runtime.batch import Batch
    from d2sd.runtime.request import buckets
    from d2sd.runtime.sampling_params import SamplingParams
    from d2sd.runtime.staging import Staging
    from d2sd.runtime.warm_up import warm_up
    from tests.runtime.meta_gpu import MetaCaptures

    auto, _, copies = method.partition("+")
    named = method.replace("auto", "hybrid")
    engine = make(bundle, named, nodes, "meta", most)
    engine.runner.capture = MetaCaptures("meta")
    engine.runner.staging = Staging("meta", engine.runner.capture.mark)
    policies = [engine.policy]
    if method == "off":
        warm_up(engine.runner, engine.steps, engine.limits, ())
    if auto == "auto":
        names = auto_policies(bundle.draft_configs, bundle.calibration)
        for lookup in (False, True) if copies else (False,):
            tree = bundle.recipe.tree.model_copy(update={"lookup": lookup})
            policies += candidate_policies(tree, 64, names, bundle.drafters)
        engine.allow(policies)
    kinds = [SamplingParams(), SamplingParams(1.0)] if sampled else [SamplingParams()]
    for policy in policies:
        for size in reversed(buckets(most)):
            for kind in kinds:
                batch = Batch.dummy(Where.scratch(size, 1), engine.runner.vocab_size, "meta", kind)
                engine.steps.graph_for(policy, batch)


def fill_training(key: str, folder: Path) -> None:
    """Compile what a training runs with the target in this folder: its engine for answers, and the head's kernels."""
    import torch

    from benchmarks.gpu.endtoend_worker import Worker
    from d2sd.bundle.load import load_bundle
    from d2sd.train.objectives.head_triton import gradient_triton, stats_triton

    with compiling(key, Counter()):
        rows, columns = 64, 1024  # of a step: columns are a multiple of 16
        logits = [torch.empty(rows, columns, dtype=torch.bfloat16, device="meta") for _ in range(2)]
        correction = torch.empty(columns, device="meta")
        ids = [torch.empty(rows, dtype=torch.long, device="meta") for _ in range(2)]
        numbers = [torch.empty(rows, device="meta") for _ in range(5)]
        stats_triton(logits[0], logits[1], correction, ids[0], ids[1])
        norms, slopes = (numbers[0], numbers[1]), (numbers[2], numbers[3], numbers[4])
        gradient_triton(logits[0], logits[1], correction, ids[0], ids[1], norms, slopes, torch.bfloat16)
    bundle = load_bundle(folder, verify=False)
    with _on_meta(key):
        _fill(bundle, Worker.engine_of, "off", 1, bundle.recipe.limits.max_batch, sampled=True)


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["key"]:
        from triton.runtime.cache import triton_key  # type: ignore[import-untyped]

        print(triton_key())
        return
    if arguments[:1] == ["relocate"]:
        print(f"{relocate(Path(arguments[1]))} kernels are compiled", file=sys.stderr)
        return
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("cache", type=Path)
    parser.add_argument("--key", required=True)
    parser.add_argument("--bundle", type=Path, help="compile for engines of this bundle")
    parser.add_argument("--wide", action="store_true", help="and of sizes that it is widened to")
    parser.add_argument("--exact", action="store_true", help="with batch-invariant steps")
    parser.add_argument("--training", type=Path, help="compile for a training with the target in this bundle")
    parser.add_argument("--only", default="", help="budgets whose names begin so")
    chosen = parser.parse_args(arguments)
    os.environ |= {"TRITON_CACHE_DIR": str(chosen.cache), "TRITON_STORE_BINARY_ONLY": "1"}
    if chosen.training:
        fill_training(chosen.key, chosen.training)
    elif chosen.bundle and chosen.wide:
        fill_wide(chosen.key, chosen.bundle)
    elif chosen.bundle:
        fill_engines(chosen.key, chosen.bundle, exact=chosen.exact)
    else:
        fill_budgets(chosen.key, chosen.only)
        fill_products(chosen.key, Counter())
    print(f"{len(list(chosen.cache.glob('*/__grp__*.json')))} kernels", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
