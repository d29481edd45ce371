"""Lists the files that a decode step of `hybrid` with copies runs through, on a CPU and as a CUDA graph, without a GPU.

A Python file counts if one of its functions runs in `Engine.step` over tiny models; for the graph, whose tensors are
fake CUDA ones, in the function that is captured or in the step that replays it. C sources count whose functions it
calls, kernels with the functions that they call. It fails where there are more than LIMITS.
"""

import argparse
import re
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from triton.runtime.jit import JITFunction  # type: ignore[import-untyped]

from d2sd.runtime import model_runner
from d2sd.runtime.cuda_graphs import capture
from d2sd.runtime.decode import StepResult
from d2sd.runtime.engine import Engine
from d2sd.runtime.request import Limits, Request
from tests.cuda import models
from tests.runtime import helpers
from tools.cuda import fake, guard

ROOT = Path(__file__).resolve().parents[1]
#: Most files on a CPU and captured: whoever reads a step reads as many.
LIMITS = 47, 61


def run_through(files: set[Path], run: Any) -> Any:
    """The result of `run`, whose files are added."""

    def called(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            files.add(Path(frame.f_code.co_filename))

    sys.setprofile(called)
    try:
        return run()
    finally:
        sys.setprofile(None)


def third_step(engine: Engine, files: set[Path]) -> set[Path]:
    """Adds the files of the third step of a greedy and a sampled request; the first one captures the graph."""
    for params in models.GREEDY, models.NARROW:
        engine.submit(Request((1, 2), 55, params))
    for step in range(3):
        run_through(files if step == 2 else set(), engine.step)
    return files


def kernel_files(kernel: Any) -> set[Path]:
    called = [kernel.fn.__globals__.get(name) for name in kernel.fn.__code__.co_names]
    functions = [one for one in called if isinstance(one, JITFunction) and one is not kernel]
    return {Path(kernel.fn.__code__.co_filename)}.union(*map(kernel_files, functions))


def c_sources(python: set[Path]) -> set[Path]:
    """C files with a function that one of these Python files calls, or that a function of such a file does."""
    texts = {file: file.read_text("utf-8") for file in (ROOT / "plugins" / "cpu").glob("*.[ch]")}
    entries = {name for file in python for name in re.findall(r"\bd2sd_\w+", file.read_text("utf-8"))}
    made = {file: set(re.findall(r"^\w[\w *]*?(\w+)\(", text, flags=re.M)) for file, text in texts.items()}
    found = {file for file, names in made.items() if names & entries}
    while more := {
        other
        for file in found
        for other in set(texts) - found
        if other.name in texts[file] and made[other] & set(re.findall(r"\w+", texts[file]))
    }:
        found |= more
    return found


def on_cuda(folder: Path) -> set[Path]:
    files, zeros = {Path(capture.__file__)}, torch.zeros
    guard.build(folder)
    guard.load(folder)

    class Captures(fake.Captures):
        def __call__(self, run: Any) -> Any:
            return run() and run_through(files, run), lambda: None

    with fake.fake_gpu(fake.Watch()), patch.object(StepResult, "unpack", fake.unpack):
        JITFunction.run = lambda kernel, *_, **__: files.update(kernel_files(kernel))
        torch.zeros = lambda *a, pin_memory=False, **k: zeros(*a, **k)
        with patch.object(model_runner, "CudaGraphs", Captures):
            runner = models.runner(2, 2, fp8=False)
        policy = models.policy_of("hybrid", lookup=True)
        return third_step(Engine(runner, policy, Limits(4, 256, 16, 64), str), files)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most", type=int, nargs=2, default=LIMITS, metavar=("CPU", "CAPTURED"), help="%(default)s")
    most = parser.parse_args().most
    on_cpu = third_step(helpers.make_engine(helpers.honest(), "hybrid", decode=str, lookup=True), set())
    on_cpu |= c_sources({file for file in on_cpu if file.is_relative_to(ROOT) and file.suffix == ".py"})
    with TemporaryDirectory() as folder:
        counted = {"on a CPU": on_cpu, "captured": on_cuda(Path(folder))}
    over = []
    for (where, files), limit in zip(counted.items(), most, strict=True):
        names = "\n".join(sorted(f"{file.resolve()}".removeprefix(f"{ROOT}/") for file in files))
        ours = re.findall(r"^(?:d2sd|modeling|plugins|runtime)/.*", names, flags=re.M)
        print(*ours, f"{len(ours)} files in a step of hybrid {where}", "", sep="\n")
        over += [f"{len(ours)} files {where}, and at most {limit} are allowed"] * (len(ours) > limit)
    sys.exit("\n".join(over) or None)


if __name__ == "__main__":
    main()
