"""Backends run a bundle: graphs in ONNX Runtime give what PyTorch gives, and a build notices a graph that does not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import Result

from d2sd.bench.result import load_result
from d2sd.build import engines as stages
from d2sd.build.pipeline import build
from d2sd.build.validate.checks import check_bundle
from d2sd.build.validate.graph_parity import ShadowDecoder
from d2sd.bundle.backends import choose_compute
from d2sd.bundle.load import Bundle, assemble, load_bundle
from d2sd.bundle.serving import make_engine
from d2sd.convert.engines.build import Job, Report
from d2sd.errors import BuildError, BundleError
from d2sd.modeling.kv_pool import Rows
from d2sd.modeling.where import Where
from d2sd.recipe import Policy, load_recipe
from d2sd.runtime.backends.exported import OnnxSession
from tests.commands import passed, refused, run_cli, succeeds
from tests.conftest import Once
from tests.convert.helpers import add_flex, write_project
from tests.runtime.helpers import some_requests
from tests.tiny import pool_for, random_tokens, tiny_decoder

onnx = pytest.importorskip("onnx", reason="the extra engines is not installed")
pytest.importorskip("onnxruntime", reason="the extra engines is not installed")
pytest.importorskip("tensorrt_rtx", reason="the extra engines is not installed")
pytestmark = [pytest.mark.export, pytest.mark.slow]


def no_engines(jobs: list[Job], *rest: Any, **options: Any) -> list[Report]:
    for job in jobs:
        Path(job.engine).write_bytes(b"engine")
    return [Report("tensorrt-rtx", "1", job.compute, {}, 2, 6) for job in jobs]


def with_graphs(once: Once, *, of_head: bool) -> Bundle:
    """With graphs, and with the figures of a build; its engines are a few bytes."""

    def make(folder: Path) -> None:
        target = tiny_decoder("qwen3", layers=2, head_dim=16)
        changes: dict[str, Any] = {
            "engines": {"compute": ["sm89"]},
            "checks": {"count": 2, "tokens": 12},
            "limits": {"max_batch": 4, "max_context": 64, "page_size": 4, "prefill_chunk": 8},
        }
        recipe = write_project(folder / "project", target, **changes)
        if of_head:
            add_flex(recipe, policy="auto")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(stages, "build_engines", no_engines)
            build(load_recipe(recipe), folder / "bundle")

    return load_bundle(once(f"bundle-with-graphs{'-of-a-head' * of_head}", make) / "bundle")


@pytest.fixture(scope="module")
def bundle(once: Once) -> Bundle:
    """A bundle of a pair. Nobody writes into it."""
    return with_graphs(once, of_head=False)


@pytest.fixture(scope="module")
def head(once: Once) -> Bundle:
    """A bundle of a FlexDraft head. Nobody writes into it."""
    return with_graphs(once, of_head=True)


def test_a_build_compares_graphs_with_models(bundle: Bundle, head: Bundle) -> None:
    figures: Any = bundle.manifest.checks["graphs"]
    assert (figures["prompts"], figures["equal_to_plain_decoding"]) == (2, {"hybrid": 2})
    of_drafters = ["hidden", "k", "v"]
    outputs = {"target": ["features", *of_drafters], "drafter_first": of_drafters, "drafter_second": of_drafters}
    for model, names in outputs.items():
        assert sorted(figures[model]) == names
        assert 0 < max(figures[model].values()) < 1e-5, "rounding, and no more"
    of_head: Any = head.manifest.checks["graphs"]
    assert (of_head["prompts"], of_head["equal_to_plain_decoding"]) == (2, {"ddtree": 2})
    assert 0 < of_head["drafter_first"]["hidden"] < 1e-5
    assert of_head["drafter_first"].keys() == {"hidden"}


@pytest.mark.parametrize(
    ("of", "policy"),
    [*(("bundle", policy) for policy in ("off", "chain", "d2sd", "hybrid")), ("head", "chain"), ("head", "ddtree")],
)
def test_graphs_write_what_pytorch_writes(request: pytest.FixtureRequest, of: str, policy: Policy) -> None:
    """Ten requests, greedy and sampled: prompts of several chunks, answers of several pages."""
    bundle: Bundle = request.getfixturevalue(of)
    plain = make_engine(bundle, policy="off").generate(some_requests())
    found = make_engine(bundle, policy=policy, backend="onnx").generate(some_requests())
    assert [s.answer for s in found] == [s.answer for s in plain]
    assert policy == "off" or any(s.stats.tau > 1 for s in found), "random drafters hit now and then"


@pytest.mark.parametrize("model", ["target", "drafter_second", "drafter_first"])
def test_a_graph_that_computes_something_else_fails_the_build(
    bundle: Bundle, head: Bundle, tmp_path: Path, model: str
) -> None:
    """One weight of a thousand is another; of a FlexDraft head too."""
    bundle = head if model == "drafter_first" else bundle
    for folder in ("target", *(role.folder for role in bundle.drafters)):
        (tmp_path / folder).symlink_to(bundle.path / folder)
    for file in (bundle.path / "onnx").iterdir():
        (tmp_path / "onnx").mkdir(exist_ok=True)
        (tmp_path / "onnx" / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "onnx" / f"{model}.onnx.data"
    numbers = np.frombuffer(weights.read_bytes(), np.float32).copy()
    numbers[::1000] += 0.5
    weights.write_bytes(numbers.tobytes())
    spoilt = assemble(bundle.path, bundle.manifest)
    object.__setattr__(spoilt, "path", tmp_path)
    with pytest.raises(BuildError, match=rf"graph of {model}[\s\S]*found[\s\S]*hidden"):
        check_bundle(spoilt)


class Spoilt(OnnxSession):
    """NaN in what drafters say, as numbers too large for fp16 would make it; K/V are in order."""

    def run(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        out = super().run(inputs)
        return out if "features" in out else out | {"hidden": out["hidden"] * torch.nan}


def test_a_graph_that_gives_nan_fails_the_build(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("d2sd.build.validate.graph_parity.OnnxSession", Spoilt)
    with pytest.raises(BuildError, match=r"graph of drafter_first[\s\S]*not finite[\s\S]*hidden"):
        check_bundle(assemble(bundle.path, bundle.manifest))


def test_a_bundle_without_drafters_has_graphs_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "build_engines", no_engines)
    changes: dict[str, Any] = {
        "engines": {"compute": ["sm89"]},
        "checks": {"count": 2, "tokens": 6},
        "drafters": {},
        "tree": {"policy": "off"},
    }
    recipe = write_project(tmp_path / "project", tiny_decoder("qwen3", layers=2, head_dim=16), **changes)
    build(load_recipe(recipe), tmp_path / "bundle")
    figures: Any = load_bundle(tmp_path / "bundle").manifest.checks["graphs"]
    assert figures["equal_to_plain_decoding"] == {"off": 2}
    assert sorted(figures["target"]) == ["hidden", "k", "v"]


def test_padding_is_not_compared() -> None:
    """Requests that only fill up a batch."""

    class Off:
        def run(self, inputs: Any) -> dict[str, torch.Tensor]:
            return {name: tensor.clone() for name, tensor in answer.items()}

    target = tiny_decoder(layers=1)
    tokens, (pool, _) = random_tokens(target, 2, 4, seed=1), pool_for(target.config.body, 2, 4)
    rows = Rows.chain(4, Where(torch.tensor([[1], [0]]), torch.zeros(2, dtype=torch.long)))
    out = target(tokens, rows, pool, (0,))
    answer = {name: getattr(out, name).clone() for name in ("hidden", "features", "k", "v")}
    beside = ShadowDecoder(target, (0,), Off())
    for spoilt in (answer["hidden"][1], answer["k"][:, 1]):
        spoilt += 1
    beside(tokens, rows, pool)
    assert max(beside.errors.relative().values()) == 0
    answer["k"][:, 0, 2] += 1
    beside(tokens, rows, pool)
    assert beside.errors.largest["k"] == pytest.approx(1, abs=1e-5)


def generate(bundle: Path, *options: str) -> Result:
    return run_cli("generate", bundle, "-p", "w1 w5", "--raw", "--max-new-tokens", 8, *options)


def test_the_command(bundle: Bundle) -> None:
    plain, graphs = generate(bundle.path), generate(bundle.path, "--executor", "onnx")
    assert passed(plain).output == passed(graphs).output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_engines_without_a_gpu(bundle: Bundle) -> None:
    refused(generate(bundle.path, "--executor", "tensorrt"), "PyTorch finds none")


def test_a_benchmark_says_what_it_ran(bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("d2sd.bench.run.write_plots", lambda result, folder: [])
    (tmp_path / "words.jsonl").write_text('{"id": "a", "turns": ["w1 w5 w9"]}\n{"id": "b", "turns": ["w7"]}\n')
    small = ["--methods", "hybrid:8", "--temperatures", "0", "--max-new-tokens", "8"]
    out, found = tmp_path / "out", {}
    for runner in ("torch", "onnx"):
        # one folder: cells of another executor are not taken for finished
        chosen = [*small, "--prompts", str(tmp_path / "words.jsonl"), "--out", str(out), "--executor", runner]
        succeeds("bench", bundle.path, *chosen)
        found[runner] = load_result(out / "result.json")
    assert [result.provenance.device for result in found.values()] == ["cpu", "cpu, onnx"]
    taus = [[cell.tau for cell in result.cells] for result in found.values()]
    assert taus[0] == taus[1]
    assert found["torch"].cells[-1].wall_seconds != found["onnx"].cells[-1].wall_seconds


def test_a_bundle_without_graphs(tmp_path: Path) -> None:
    build(load_recipe(write_project(tmp_path / "project")), tmp_path / "bundle", validate=False)
    for runner in ("onnx", "tensorrt"):
        refused(generate(tmp_path / "bundle", "--executor", runner), "neither graphs nor engines")


def test_engines_for_this_gpu_come_before_those_for_any() -> None:
    assert choose_compute(["portable", "sm89"], (8, 9), Path()) == "sm89"
    assert choose_compute(["sm89", "portable"], (9, 0), Path()) == "portable"
    assert choose_compute(["native"], (9, 0), Path()) == "native"
    with pytest.raises(BundleError, match=r"found: sm89, sm120\n  expected: sm90"):
        choose_compute(["sm89", "sm120"], (9, 0), Path())
