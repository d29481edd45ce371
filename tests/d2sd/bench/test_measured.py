"""Step times that engines measured on the user's GPU, found again for a capacity sheet, and the steps made of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from d2sd.bench import measured
from d2sd.build.plan import Part, Plan
from d2sd.bundle.step_times import About, kept_step_times
from d2sd.errors import D2SDError
from d2sd.io import digest
from d2sd.manifest import NAME
from d2sd.modeling.config import BodyConfig, DrafterConfig, RopeConfig
from d2sd.policies import DrafterRole
from d2sd.recipe import Recipe
from d2sd.runtime.model_runner import ModelRunner
from d2sd.runtime.request import Limits
from d2sd.runtime.speculation.policy import Chain, Off, Policy, make_policy
from d2sd.runtime.step_times import StepTimes

H100 = "NVIDIA H100 80GB HBM3"
POLICIES = Off(1), Chain(4)
FILES = {"target/model": "0" * 64}


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("D2SD_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture
def keep(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Writes a file of step times as an engine does; each takes longer than the one before, and is newer."""
    count = iter(range(1, 99))

    def write_times(**changed: Any) -> Path:
        number = next(count)
        times = StepTimes({(policy, size): 0.01 * number for policy in POLICIES for size in (1, 2)}, {}, {})
        monkeypatch.setattr("d2sd.bundle.step_times.measure_step_times", lambda *_: times)
        about: dict[str, Any] = {"gpu": H100, "bundle": digest(FILES), "backend": "torch", "ranks": 1} | changed
        path, runner = folder / f"step-times-{number}.json", cast("ModelRunner", None)
        kept_step_times(path, runner, POLICIES, {}, Limits(2, 64, 4, 16), about=About(**about))
        os.utime(path, (number, number))
        return path

    return write_times


def plan_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The plan of a bundle with these files."""
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    (bundle / NAME).write_text("")
    monkeypatch.setattr(measured, "load_manifest", lambda _: SimpleNamespace(files=FILES))
    return SimpleNamespace(recipe=SimpleNamespace(folder=bundle), ranks=1)


def test_the_newest_step_times_of_this_bundle_on_such_a_gpu(
    folder: Path, keep: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plan = plan_of(tmp_path, monkeypatch)

    def find(gpu: str, policies: Sequence[Policy], sizes: Sequence[int], given: Path | None = None) -> StepTimes | None:
        return measured.StepFiles.of(plan, gpu, given).find(policies, sizes)

    assert find("H100", POLICIES, (1, 2)) is None
    keep()
    keep()
    others: list[dict[str, Any]] = [
        {"gpu": "NVIDIA H200"},
        {"gpu": None},
        {"bundle": "1" * 64},
        {"backend": "tensorrt"},
        {"ranks": 2},
    ]
    for changed in others:
        keep(**changed)
    (folder / "step-times-x.json").write_text("{")
    os.utime(folder / "step-times-x.json", (99, 99))
    found = find("H100", POLICIES, (1, 2))
    assert found is not None
    assert found.step(POLICIES[1], 2, 0) == pytest.approx(0.02), "the second, the last that is like this"
    assert find("B200", POLICIES, (1, 2)) is None
    fewer = find("H100", POLICIES[:1], (1,))
    assert fewer is not None
    assert fewer.seconds.keys() == {(POLICIES[0], 1), (POLICIES[0], 2)}
    assert find("H100", POLICIES, (1, 2, 4)) is None, "a batch was not measured"
    first = find("H100", POLICIES, (1, 2), folder / "step-times-1.json")
    assert first is not None
    assert first.step(POLICIES[1], 2, 0) == pytest.approx(0.01), "the file that was named"
    assert find("H100", POLICIES, (1, 2), folder / "step-times-3.json") is None, "of another GPU"
    assert find("H100", POLICIES, (1, 2), folder / "absent.json") is None
    (plan.recipe.folder / NAME).unlink()
    assert find("H100", POLICIES, (1, 2), folder / "step-times-1.json") is not None
    assert find("H100", POLICIES, (1, 2)) is None, "a recipe has no step times"


def test_names_of_gpus() -> None:
    assert measured.is_kind("NVIDIA B200", "B200")
    assert not measured.is_kind("NVIDIA GH200 480GB", "H200")


RECIPE = Recipe.model_validate(
    {
        "d2sd": 1,
        "name": "qwen3-8b",
        "target": {"path": "t"},
        "precision": "bf16",
        "drafters": {"first": {"path": "f"}, "second": {"path": "s"}},
        "tree": {"block_size": 16, "branches": 4, "row_budget": 64},
        "limits": {"max_batch": 16, "max_context": 8192, "prefill_chunk": 512},
    }
)


def _drafter(role: DrafterRole) -> Part:
    body = BodyConfig(4096, 12288, 5, 32, 8, 128, 1e-6, RopeConfig(1e6), 40960, True, False, False)
    config = DrafterConfig(body, 151_936, 16, 151_669, (1, 9, 17, 25, 33), 36, "first")
    return Part(role.folder, "", config, 1_048_626_432, 2 * 1_048_626_432, 20_480, True, role)


PLAN = Plan(RECIPE, None, None, {role: _drafter(role) for role in (DrafterRole.FIRST, DrafterRole.SECOND)})
OFF = make_policy("off", block_size=16, branches=4, row_budget=64)
TREE = make_policy("hybrid", block_size=16, branches=4, row_budget=64, lookup=True)
SECONDS = {(policy, size): 0.01 * size for policy in (OFF, TREE) for size in (1, 2, 3, 4)}


def costs(policy: Any, tau: float | None, changed: dict[tuple[Policy, int], float | None]) -> list[measured.Step]:
    """Steps of requests of 1,064 tokens by `SECONDS` with these changes; those that are None are left out."""
    seconds = {step: found for step, found in (SECONDS | changed).items() if found is not None}
    files = SimpleNamespace(find=lambda *_: StepTimes(seconds, {(OFF, 1): 1e-6}, {}))
    return measured.step_costs(PLAN, cast("measured.StepFiles", files), policy, 4, 1064, tau)


def test_auto_chooses_by_batch_and_serves_plain_decoding_where_nothing_pays() -> None:
    found = costs("auto", 4.0, {(TREE, 4): 0.5})
    assert [cost.policy for cost in found] == ["hybrid+lookup of 64 rows and 4 branches"] * 3 + ["off"]
    assert [cost.seconds for cost in found] == pytest.approx([0.01, 0.02, 0.03, 0.04])
    assert [cost.tokens for cost in found] == [4.0, 4.0, 4.0, 1.0]


def test_steps_are_those_of_the_context() -> None:
    plain = costs("off", None, {})
    assert plain[0].batch == 1
    assert plain[0].seconds == pytest.approx(0.01 + 1e-6 * 1000)


def test_trees_that_were_not_timed_are_not_served_unless_they_are_asked_for() -> None:
    fewer = costs("auto", 4.0, {(TREE, 4): None})
    assert (fewer[-1].batch, fewer[-1].policy) == (4, "off")
    assert costs("hybrid", 4.0, {(TREE, 4): None}) == []


def test_unknown_tokens_a_step_are_asked_for() -> None:
    with pytest.raises(D2SDError, match=r"(?s)tokens a step are unknown.*--tau"):
        costs("auto", None, {})
    with pytest.raises(D2SDError, match=r"(?s)out of range.*1 \.\. 16"):
        costs("auto", 17, {})
