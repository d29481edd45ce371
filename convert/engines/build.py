"""Builds the engines of a bundle: one process per graph and compute capability, several in parallel.

A process is `python -m d2sd.convert.engines.build JOB.json`: the job file holds all arguments and names the report
file. Engines have processes of their own because LD_LIBRARY_PATH is read when a process starts, because a crash of the
builder ends its process, and because several can run in parallel.
"""

from __future__ import annotations

import ctypes.util
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from d2sd.convert.engines.profiles import Profile
from d2sd.errors import BuildError, D2SDError
from d2sd.extras import install_line
from d2sd.helpers import python_command
from d2sd.io import read_json
from d2sd.plugins.cascade_attention.onnx import INPUTS
from d2sd.plugins.cascade_attention.tensorrt.plugin import register
from d2sd.plugins.head_sizes import HEAD_STEP, LARGEST_HEAD
from d2sd.progress import Progress, silent
from d2sd.tensorrt_env import COMPUTE, Builder, ErrorLog, TensorRT, find_tensorrt

#: Incremented with every change of `configure`: engines built with other settings are rebuilt.
SETTINGS = 1


@dataclass(frozen=True, slots=True)
class Job:
    """One engine to build."""

    graph: str
    engine: str
    report: str
    builder: Builder
    compute: str  # of COMPUTE, "portable" or "native"
    profiles: list[Profile]
    plugins: bool = True  # False: attention is built from the graph's functions


@dataclass(frozen=True, slots=True)
class Report:
    """The engine that was built."""

    builder: str
    version: str
    compute: str
    layers: dict[str, int]  # kind -> how many, as parsed
    plugins: int
    bytes: int


def build_engine(job: Job) -> Report:
    """Build one engine. Raises `BuildError` with the message of the parser or the builder."""
    trt = find_tensorrt(job.builder)
    if job.compute not in trt.targets:
        raise BuildError(
            f"{trt.name} does not build engines for this compute capability.",
            where="engines.compute",
            found=job.compute,
            expected=", ".join(trt.targets),
        )
    errors = ErrorLog(trt.module)
    if job.plugins:
        register(trt.module)
    builder = trt.module.Builder(errors.log)
    flags = 1 << int(trt.module.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    network = builder.create_network(flags)
    parser = trt.module.OnnxParser(network, errors.log)
    if job.plugins:
        parser.set_flag(trt.module.OnnxParserFlag.ENABLE_PLUGIN_OVERRIDE)
    if not parser.parse_from_file(job.graph):
        message = "; ".join(str(parser.get_error(i)) for i in range(parser.num_errors))
        raise BuildError("TensorRT cannot parse the graph.", where=job.graph, found=message or errors.drain())
    layers = Counter(str(network.get_layer(i).type).rpartition(".")[2] for i in range(network.num_layers))
    _check_plugins(job, layers["PLUGIN_V3"])
    for layer in (network.get_layer(i) for i in range(network.num_layers)):
        if str(layer.type).endswith("PLUGIN_V3"):
            _check_head_size(job, layer.get_input(0).shape[3])
    config = configure(trt, builder, job)
    blob = builder.build_serialized_network(network, config)
    if blob is None:
        raise BuildError("The engine cannot be built.", where=job.graph, found=errors.drain(), expected=job.compute)
    engine = bytes(blob)
    Path(job.engine).write_bytes(engine)
    return Report(trt.name, trt.version, job.compute, dict(sorted(layers.items())), layers["PLUGIN_V3"], len(engine))


def configure(trt: TensorRT, builder: Any, job: Job) -> Any:
    """Builder flags, compute capability and optimization profiles."""
    config = builder.create_builder_config()
    config.clear_flag(trt.module.BuilderFlag.TF32)  # on by default: it would round fp32 to 10 bits
    if trt.name == "tensorrt-rtx":  # required for capturing runs in a CUDA graph
        config.set_flag(trt.module.BuilderFlag.REQUIRE_USER_ALLOCATION)
    if job.compute in COMPUTE:
        config.num_compute_capabilities = 1
        config.set_compute_capability(getattr(trt.module.ComputeCapability, COMPUTE[job.compute]), 0)
    for shapes in job.profiles:
        profile = builder.create_optimization_profile()
        for name, (low, opt, high) in shapes.items():
            profile.set_shape(name, low, opt, high)
        config.add_optimization_profile(profile)
    return config


def _check_plugins(job: Job, plugin_layers: int) -> None:
    """Check that every attention node became our plugin: as an ONNX function it would run, but slowly."""
    import onnx

    nodes = onnx.load(job.graph, load_external_data=False).graph.node
    expected = sum(node.op_type in INPUTS for node in nodes) if job.plugins else 0
    if plugin_layers != expected:
        raise BuildError(
            "Not every attention node became a plugin layer.",
            where=job.graph,
            found=f"{plugin_layers} plugin layers",
            expected=expected,
        )


def _check_head_size(job: Job, size: int) -> None:
    """Check the head size here: TensorRT crashes when a plugin raises."""
    if size % HEAD_STEP or size > LARGEST_HEAD:
        raise BuildError(
            "The attention kernels do not support this head size.",
            where=job.graph,
            found=size,
            expected=f"a multiple of {HEAD_STEP} up to {LARGEST_HEAD}",
        )


def main(path: str) -> int:
    """Run the job of a file; write the report, or the error's parts, to the job's report file."""
    job = Job(**json.loads(Path(path).read_text("utf-8")))
    try:
        report: dict[str, Any] = asdict(build_engine(job))
    except D2SDError as error:
        parts = ("what", "where", "found", "expected", "fix")
        report = {"error": {part: None if (value := getattr(error, part)) is None else str(value) for part in parts}}
    Path(job.report).write_text(json.dumps(report), "utf-8")
    return 2 if "error" in report else 0


def build_engines(
    jobs: Sequence[Job], scratch: Path, *, at_once: int = 1, progress: Progress = silent, what: str = "building engines"
) -> list[Report]:
    """Build all engines. Raises the first failure as `BuildError`, after the running builds have ended."""
    with progress(what, len(jobs)) as advance, ThreadPoolExecutor(at_once) as pool:
        futures = [pool.submit(_build, job, scratch / f"{index}") for index, job in enumerate(jobs)]
        try:
            for future in as_completed(futures):
                future.result()
                advance(1)
        except BaseException:
            pool.shutdown(cancel_futures=True)  # those that have not started
            raise
    return [future.result() for future in futures]


def _build(job: Job, folder: Path) -> Report:
    folder.mkdir(parents=True, exist_ok=True)
    Path(job.report).unlink(missing_ok=True)  # or an earlier run's report would be read as this one's
    file = folder / "job.json"
    file.write_text(json.dumps(asdict(job)), "utf-8")
    environment = dict(os.environ)
    linked = unversioned_library(job.builder, folder / "lib") if job.plugins else None
    if linked is not None:
        environment["LD_LIBRARY_PATH"] = os.pathsep.join(
            filter(None, (str(linked), environment.get("LD_LIBRARY_PATH")))
        )
    command = python_command("d2sd.convert.engines.build", str(file))
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if not Path(job.report).is_file():
        raise BuildError(
            "The engine builder crashed.",
            where=job.graph,
            found=f"exit code {done.returncode}: {done.stderr.strip().rpartition(os.linesep)[2]}",
        )
    report = read_json(Path(job.report), error=BuildError)
    if "error" in report:
        raise BuildError(report["error"].pop("what"), **report["error"])
    return Report(**report)


def unversioned_library(name: Builder, folder: Path) -> Path | None:
    """Link TensorRT-RTX's library in `folder` under the name that its parser opens to load plugins.

    The wheel contains only libtensorrt_rtx.so.1, and the parser opens libtensorrt_rtx.so. Returns the folder to put on
    LD_LIBRARY_PATH, which is read when a process starts; None if the library is found without it.
    """
    if name != "tensorrt-rtx" or ctypes.util.find_library("tensorrt_rtx"):
        return None
    libraries = find_spec("tensorrt_rtx_libs")
    folders = libraries.submodule_search_locations if libraries else None
    files = [file for each in folders or () for file in sorted(Path(each).glob("libtensorrt_rtx.so.*"))]
    if not files:
        raise BuildError(
            "TensorRT-RTX's parser cannot find the library that it loads for plugins.",
            where="engines",
            expected="libtensorrt_rtx.so",
            fix=f"put its folder on LD_LIBRARY_PATH, or {install_line('engines')}",
        )
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / "libtensorrt_rtx.so"
    link.unlink(missing_ok=True)
    link.symlink_to(files[0])
    return folder


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
