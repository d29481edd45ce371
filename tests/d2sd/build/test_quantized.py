"""Building from published quantized targets: what the plan says and refuses, and what the bundle holds."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from d2sd.build.pipeline import build
from d2sd.build.plan import make_plan
from d2sd.build.quantized import Choice
from d2sd.build.tables import show_plan
from d2sd.bundle.contents import show_manifest
from d2sd.errors import CheckpointError, RecipeError
from d2sd.manifest import load_manifest
from d2sd.recipe import load_recipe
from tests.convert.checkpoint.published import LAYOUTS, Published
from tests.convert.helpers import write_project

ROOT = Path(__file__).parents[3]
#: One of each way to store weights; `make test-slow` has all.
SAMPLED = ("fp8-blocks", "nvfp4-modelopt")
BY_NAME = {layout.name: layout for layout in LAYOUTS}


def project(folder: Path, layout: Published) -> Path:
    recipe = write_project(folder, layout.decoder(), precision="bf16")
    layout.write(folder / "target")
    return recipe


def choice_of(recipe: Path, *changes: str) -> tuple[Choice, int]:
    part = make_plan(load_recipe(recipe, list(changes))).parts[0]
    assert part.choice is not None
    return part.choice, part.weight_bytes


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(layout, id=layout.name, marks=() if layout.name in SAMPLED else pytest.mark.slow)
        for layout in LAYOUTS
    ],
)
def test_memory_is_the_bytes_of_the_tensors(layout: Published, tmp_path: Path) -> None:
    recipe = project(tmp_path, layout)
    tensors = load_file(tmp_path / "target" / "model.safetensors")
    stored = sum(tensor.nbytes for tensor in tensors.values())
    for name, tensor in tensors.items():
        if name.endswith(("scale", "scale_inv", "scales")) and tensor.itemsize == 2:
            stored += 2 * tensor.numel()  # d2sd holds scales in fp32
    plain = 2 * sum(tensor.numel() for tensor in layout.decoder().state_dict().values())
    if layout.rounded is not None:
        choice, served = choice_of(recipe)
        assert (choice.stored, choice.plain, served) == (stored, plain, stored)
    choice, served = choice_of(recipe, "target.dequantize=true")
    assert (choice.stored, choice.plain, served) == (stored, plain, plain)
    assert make_plan(load_recipe(recipe, ["target.dequantize=true"])).parts[0].parameters == plain // 2


@pytest.mark.parametrize("name", ["fp8-blocks", "fp8-weights"])
def test_a_plan_tells_both_ways(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = project(tmp_path, BY_NAME[name])
    if BY_NAME[name].rounded is None:
        with pytest.raises(
            CheckpointError, match=r"FP8 weights alone, \d.*B(.|\n)*dequantize to true(.|\n)*bf16 \(\d.*B\)(.|\n)*FP8"
        ):
            make_plan(load_recipe(recipe))
    else:
        show_plan(make_plan(load_recipe(recipe)), tmp_path / "out")
        told = capsys.readouterr().out
        assert "FP8 in blocks of 128 × 128, 0.2 MB as stored; target.dequantize would make it 0.3 MB in bf16" in told
        assert "scaled_mm with 1 × 128 and 128 × 128 scales" in told
    show_plan(make_plan(load_recipe(recipe, ["target.dequantize=true"])), tmp_path / "out")
    assert "dequantized (target.dequantize)" in capsys.readouterr().out


def test_what_such_a_target_cannot_have(tmp_path: Path) -> None:
    recipe = project(tmp_path, BY_NAME["fp8-dynamic"])
    with pytest.raises(RecipeError, match="FP8, a scale a channel and a token already"):
        make_plan(load_recipe(recipe, ["fp8={}"]))
    engines = "engines={builder: tensorrt-rtx, compute: [sm120]}"
    with pytest.raises(RecipeError, match=r"Graphs hold FP8(.|\n)*target\.dequantize"):
        make_plan(load_recipe(recipe, [engines]))
    assert make_plan(load_recipe(recipe, ["fp8={}", "target.dequantize=true"])).parts[0].choice is not None
    with pytest.raises(RecipeError, match=r"GGUF(.|\n)*dequantize"):
        load_recipe(ROOT / "recipes" / "smollm2-135m.yaml", ["target.dequantize=true"])


@pytest.mark.slow
@pytest.mark.parametrize("dequantize", [False, True])
def test_a_bundle_says_how_its_target_was_quantized(
    dequantize: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = project(tmp_path, BY_NAME["fp8-dynamic"])
    bundle = tmp_path / "bundle"
    build(load_recipe(recipe, [f"target.dequantize={str(dequantize).lower()}"]), bundle)
    manifest = load_manifest(bundle)
    text = "FP8, a scale a channel and a token" + ", dequantized to bf16" * dequantize
    assert manifest.target.quantization == text
    show_manifest(bundle, manifest)
    assert f"quantization {text}" in capsys.readouterr().out
    kinds = {str(tensor.dtype) for tensor in load_file(bundle / "target" / "model.safetensors").values()}
    assert kinds == {"torch.bfloat16"} | (set() if dequantize else {"torch.float8_e4m3fn", "torch.float32"})
