"""Engines of a target and its drafter, built on a CPU: of SmolLM2, and of a tiny Qwen3 with heads of the same size.

`make engines` builds them for any GPU and for two architectures, in fp16 and FP8: all six of each. `make test-slow`
builds one of SmolLM2's first six layers with the whole drafter, for a layer takes as long as any other, and one of the
tiny model's for any GPU.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from d2sd.bundle.load import load_bundle
from d2sd.convert.engines.build import Job, build_engines
from d2sd.convert.engines.profiles import make_profiles
from d2sd.convert.kinds import DFLASH
from d2sd.convert.onnx.export import export_drafter, export_target
from d2sd.modeling.config import DecoderConfig, DrafterConfig
from d2sd.modeling.decoder import Decoder
from d2sd.modeling.drafters.dflash import Drafter
from d2sd.policies import DrafterRole
from d2sd.recipe import Compute, Recipe, load_recipe
from tests.tiny import in_fp8, tiny_decoder, tiny_drafter

pytest.importorskip("tensorrt_rtx", reason="the extra engines is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.engines, pytest.mark.export, pytest.mark.timeout(1500)]
#: No architecture (the engine is finished on the GPU that loads it), and two named ones.
COMPUTE: tuple[Compute, ...] = ("portable", "sm89", "sm120")
ROOT = Path(__file__).parents[1]


def build_all(folder: Path, recipe: Recipe, target: Decoder, drafter: Drafter, compute: Compute) -> None:
    """Build graphs and engines of both models; check that every attention became our plugin."""
    page = recipe.limits.page_size
    export_target(target, drafter.config.target_layer_ids, page, folder / "target.onnx")
    dtype = target.embed_tokens.weight.dtype
    export_drafter(DFLASH.graph_body(drafter), drafter.config, dtype, page, folder / "drafter.onnx")
    configs: dict[str, DecoderConfig | DrafterConfig] = {"target": target.config, "drafter": drafter.config}
    layers = {name: config.body.num_layers for name, config in configs.items()}
    jobs = [
        Job(
            str(folder / f"{name}.onnx"),
            str(folder / f"{name}.{compute}"),
            str(folder / f"{name}.{compute}.json"),
            "tensorrt-rtx",
            compute,
            make_profiles(recipe, "tensorrt-rtx", config),
        )
        for name, config in configs.items()
    ]
    for job, report in zip(jobs, build_engines(jobs, folder / "scratch", at_once=2), strict=True):
        name = Path(job.graph).stem
        assert (report.plugins, report.compute) == (layers[name], job.compute)
        assert "SOFTMAX" not in report.layers
        Path(job.engine).unlink()  # some hundred megabytes each


def narrow(drafter: Drafter) -> Drafter:
    """In FP8 as a bundle loads it."""
    return in_fp8(drafter)


@pytest.mark.model
@pytest.mark.full
@pytest.mark.parametrize("compute", COMPUTE)
@pytest.mark.parametrize("fp8", [False, True], ids=["fp16", "fp8"])
def test_smollm2(smollm2_bundle: Path, tmp_path: Path, fp8: bool, compute: Compute) -> None:
    build_smollm2(*pair(smollm2_bundle), tmp_path, fp8, compute)


@pytest.mark.full
@pytest.mark.model
def test_the_first_layers_of_smollm2(smollm2_bundle: Path, tmp_path: Path) -> None:
    """All of its geometry but the number of layers; the drafter reads as many of them as of the whole target."""
    target, drafter = pair(smollm2_bundle)
    read = len(drafter.config.target_layer_ids)
    body = replace(target.config.body, num_layers=read + 1)
    cut = Decoder(replace(target.config, body=body))
    cut.load_state_dict({name: target.state_dict()[name] for name in cut.state_dict()}, assign=True)
    config = replace(drafter.config, num_target_layers=read + 1, target_layer_ids=tuple(range(read)))
    drafter.config = config
    build_smollm2(cut.eval(), drafter, tmp_path, True, "sm89")


def pair(folder: Path) -> tuple[Decoder, Drafter]:
    """SmolLM2 and its first drafter, whose engine the second shares."""
    bundle = load_bundle(folder, verify=False)
    first, second = (bundle.drafters[role] for role in (DrafterRole.FIRST, DrafterRole.SECOND))
    assert isinstance(first, Drafter)
    assert str(second.config) == str(first.config), "one engine stands for both"
    return bundle.target, first


def build_smollm2(target: Decoder, drafter: Drafter, folder: Path, fp8: bool, compute: Compute) -> None:
    target, drafter = target.half(), drafter.half()
    if fp8:
        target, drafter = in_fp8(target, cache=True), narrow(drafter)
    build_all(folder, load_recipe(ROOT / "recipes" / "smollm2-135m.yaml"), target, drafter, compute)


@pytest.mark.parametrize(
    ("fp8", "compute"),
    [
        pytest.param(
            fp8,
            compute,
            id=f"{'fp8' if fp8 else 'fp16'}-{compute}",
            marks=[] if (fp8, compute) == (True, "portable") else pytest.mark.full,
        )
        for fp8 in (False, True)
        for compute in COMPUTE
    ],
)
def test_tiny_qwen3(tmp_path: Path, fp8: bool, compute: Compute) -> None:
    target = tiny_decoder("qwen3", layers=2, heads=9, kv_heads=3, head_dim=64).half()  # SmolLM2's attention
    drafter = tiny_drafter(target.config).half()
    if fp8:
        target, drafter = in_fp8(target), narrow(drafter)
    recipe = Recipe.model_validate(
        {
            "d2sd": 1,
            "name": "tiny",
            "target": {"path": "target"},
            "drafters": {"first": {"path": "first"}},
            "tree": {"policy": "ddtree", "block_size": 4, "branches": 3},
            "limits": {"page_size": 16},
            "sampling": {"max_new_tokens": 8},
        }
    )
    build_all(tmp_path, recipe, target, drafter, compute)
