"""Builds one engine from one graph in a separate process: python -m d2sd.convert.engines.worker JOB.json.

One process per engine, because LD_LIBRARY_PATH is read when a process starts, because a crash of the builder ends its
process, and because several can run in parallel. The job file holds all arguments and names the report file.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from d2sd.convert.engines.profiles import Profile
from d2sd.errors import BuildError, D2SDError
from d2sd.plugins.cascade_attention.onnx import BLOCK, TREE
from d2sd.plugins.cascade_attention.tensorrt.plugin import register
from d2sd.plugins.dispatch import HEAD_STEP, LARGEST_HEAD
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
            f"{trt.name} does not build engines for this compute capability.", where="engines.compute",
            found=job.compute, expected=", ".join(trt.targets),
        )  # fmt: skip
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


def _check_plugins(job: Job, found: int) -> None:
    """Check that every attention node became our plugin: as an ONNX function it would run, but slowly."""
    import onnx

    nodes = onnx.load(job.graph, load_external_data=False).graph.node
    wanted = sum(node.op_type in (TREE, BLOCK) for node in nodes) if job.plugins else 0
    if found != wanted:
        raise BuildError(
            "Not every attention node became a plugin layer.", where=job.graph,
            found=f"{found} plugin layers", expected=wanted,
        )  # fmt: skip


def _check_head_size(job: Job, size: int) -> None:
    """Check the head size here: TensorRT crashes when a plugin raises."""
    if size % HEAD_STEP or size > LARGEST_HEAD:
        raise BuildError(
            "The attention kernels do not support this head size.", where=job.graph, found=size,
            expected=f"a multiple of {HEAD_STEP} up to {LARGEST_HEAD}",
        )  # fmt: skip


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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
