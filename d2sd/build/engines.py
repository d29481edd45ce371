"""Graph and engine stages of a build.

onnx               graphs of all models, from the checkpoints of the bundle
engines/<compute>  one engine per model, built in parallel; an interrupted build resumes with the next compute
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from d2sd.build.plan import Plan
from d2sd.build.stage_cache import StageCache
from d2sd.convert.checkpoint.target import load_target
from d2sd.convert.checkpoint.weights import DTYPES
from d2sd.convert.engines.build import SETTINGS, Job, build_engines
from d2sd.convert.engines.profiles import Profile, make_profiles
from d2sd.convert.onnx.export import TOOLS, export_drafter, export_target, require_exporter
from d2sd.manifest import Engines as Built
from d2sd.plugins.cascade_attention.onnx import VERSION as PLUGIN_ABI
from d2sd.recipe import Engines
from d2sd.tensorrt_env import TensorRT, find_tensorrt

GRAPHS = "onnx"


@dataclass(frozen=True, slots=True)
class EngineBuild:
    """Graphs and engines of one plan; `trt` builds them."""

    plan: Plan
    work: StageCache
    trt: TensorRT

    @classmethod
    def of(cls, plan: Plan, work: StageCache) -> EngineBuild | None:
        """The build that the recipe asks for, if any. Raises `BuildError` if a package for it is not installed."""
        if plan.recipe.engines is None:
            return None
        require_exporter()
        return cls(plan, work, find_tensorrt(plan.recipe.engines.builder))

    @property
    def wanted(self) -> Engines:
        assert self.plan.recipe.engines is not None
        return self.plan.recipe.engines

    @property
    def stages(self) -> tuple[str, ...]:
        return GRAPHS, *(f"engines/{compute}" for compute in self.wanted.compute)

    @property
    def tools(self) -> dict[str, str]:
        """Versions of the tools that determine the graphs' bytes and the figures of their checks."""
        return {tool: version(tool) for tool in TOOLS}

    def run(self, common: Mapping[str, object], models: Mapping[str, str]) -> tuple[dict[str, str], Built]:
        """Run all stages; `models` and the result map a file to its hash. Also returns a description of the engines."""
        recipe, size = self.plan.recipe, self.plan.graph_bytes
        # that drafters read; all that read features read the same
        layers = (part.draft_config.target_layer_ids for part in self.plan.drafters.values())
        aux_layer_ids = next(filter(None, layers), ())
        inputs = dict(common) | {
            "models": list(models.items()),
            "tools": self.tools,
            "aux_layer_ids": aux_layer_ids,
            "page_size": recipe.limits.page_size,
        }
        files = dict(self.work.stage(GRAPHS, inputs, size, lambda folder: self._export(folder, aux_layer_ids)).files)
        graphs = list(files.items())
        profiles = {part.name: make_profiles(recipe, self.trt.name, part.config) for part in self.plan.parts}
        plugins: dict[str, int] = {}
        for compute in self.wanted.compute:
            inputs = dict(common) | {
                "graphs": graphs,
                "profiles": profiles,
                "builder": [self.trt.name, self.trt.version],
                "abi": PLUGIN_ABI,
                "settings": SETTINGS,
            }
            marker = self.work.stage(
                f"engines/{compute}", inputs, size, partial(self._build, compute=compute, profiles=profiles)
            )
            files |= marker.files
            plugins = {model: report["plugins"] for model, report in (marker.result or {}).items()}
        built = Built(
            builder=self.trt.name,
            version=self.trt.version,
            plugin_abi=PLUGIN_ABI,
            compute=tuple(self.wanted.compute),
            profiles=profiles,
            plugins=plugins,
        )
        return files, built

    def _export(self, folder: Path, aux_layer_ids: tuple[int, ...]) -> None:
        recipe = self.plan.recipe
        dtype, page_size = DTYPES[recipe.precision], recipe.limits.page_size
        with self.work.progress("writing graphs", len(self.plan.parts)) as advance:
            target = load_target(self.work.bundle / "target", dtype)
            export_target(target, aux_layer_ids, page_size, folder / "target.onnx")
            advance(1)
            for part in self.plan.drafters.values():
                drafter = part.kind.load(self.work.bundle / part.name, dtype)
                part.kind.attach(drafter, target)
                body = part.kind.graph_body(drafter)
                export_drafter(body, drafter.config, dtype, page_size, folder / f"{part.name}.onnx")
                advance(1)

    def _build(self, folder: Path, compute: str, profiles: Mapping[str, list[Profile]]) -> dict[str, Any]:
        """Build the engines of one compute capability; return the report of each model."""
        folder.mkdir(parents=True)
        with self.work.scratch() as scratch:
            jobs = [
                Job(
                    graph=str(self.work.bundle / GRAPHS / f"{part.name}.onnx"),
                    engine=str(folder / f"{part.name}.engine"),
                    report=str(scratch / f"{part.name}.json"),
                    builder=self.trt.name,
                    compute=compute,
                    profiles=profiles[part.name],
                )
                for part in self.plan.parts
            ]
            at_once = min(len(jobs), os.cpu_count() or 1)
            scratch.mkdir(parents=True, exist_ok=True)
            reports = build_engines(
                jobs, scratch, at_once=at_once, progress=self.work.progress, what=f"building engines for {compute}"
            )
        return {part.name: asdict(report) for part, report in zip(self.plan.parts, reports, strict=True)}
