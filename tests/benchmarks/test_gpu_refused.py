"""No part of the GPU suite measures PyTorch in place of the kernels: it says `refused`, and so does the exit status."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

pytest.importorskip("triton", reason="the extra triton is not installed")

from benchmarks.gpu import evidence, layers, suite
from benchmarks.gpu.cases import Refused, run_cases
from benchmarks.gpu.record import Record
from d2sd.plugins import dispatch
from d2sd.plugins.dispatch import NoKernel

WITHOUT = {"ceilings", "bundles", "training", "probe"}
OLD = "triton 3.6.0 leaves out a fence"


@pytest.fixture
def old_triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Triton 3.6 is reported, as on a GPU with torch 2.11."""
    monkeypatch.setattr(dispatch, "triton_version", lambda: Version("3.6.0"))
    dispatch.unsupported.cache_clear()
    yield
    dispatch.unsupported.cache_clear()


def statuses(folder: Path) -> dict[str, str]:
    return {key: row["status"] for key, row in Record(folder).rows.items()}


def test_every_part_is_refused_without_its_kernels(
    old_triton: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begun = []

    def process(arguments: list[str], seconds: float) -> int:
        begun.append(arguments[1])
        Record(Path(arguments[arguments.index("--out") + 1])).put(f"{arguments[1]}/1", "ok")
        return 0

    monkeypatch.setattr(suite, "_process", process)
    assert suite.main(["--dry", "--out", str(tmp_path)]) == suite.REFUSED
    assert set(begun) == WITHOUT
    rows = Record(tmp_path).rows
    for part in suite.PARTS.keys() - WITHOUT:
        assert rows[f"{part}/all"]["status"] == "refused"
        assert OLD in rows[f"{part}/all"]["reason"]
    said = capsys.readouterr().out
    assert said.count(f"/all: refused, {OLD}") == len(suite.PARTS) - len(WITHOUT)
    tables, _, closing = said.rstrip("\n").rpartition("\n")
    assert (tmp_path / "gpu.md").read_text() == f"{tables}\n"
    refused = len(suite.PARTS) - len(WITHOUT)
    assert closing == f"{len(rows)} cases: {len(rows) - refused} ok, 0 skipped, {refused} failed"


def test_fallbacks_are_forbidden_before_anything_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For every part and its processes; the script sets it too."""
    seen = []
    monkeypatch.setattr(suite, "run_part", lambda *_, **__: seen.append(os.environ[dispatch.NO_FALLBACK]))
    suite.main(["--dry", "--out", str(tmp_path)])
    assert seen == ["1"] * len(suite.PARTS)


def ran(measure: Callable[..., dict[str, Any]], folder: Path) -> dict[str, Any]:
    run_cases(Record(folder), [("a/1", measure)], time.time() + 60, launches=True)
    return Record(folder).rows["a/1"]


def test_a_case_that_launched_nothing_is_not_ok(tmp_path: Path) -> None:
    assert ran(lambda note: {"fused": 0}, tmp_path) == {"status": "refused", "reason": "no kernel of d2sd was launched"}

    def launch(note: Callable[..., None]) -> dict[str, Any]:
        evidence.LAUNCHES.add()
        return {"ms": 1}

    with_one = ran(launch, tmp_path / "b")
    assert (with_one["status"], with_one["ms"]) == ("ok", 1)


def test_only_kernels_of_d2sd_are_counted() -> None:
    import triton  # type: ignore[import-untyped]
    from triton.runtime.jit import JITFunction  # type: ignore[import-untyped]

    from d2sd.plugins.kv_pages.triton import kernel

    ours = next(one for one in vars(kernel).values() if isinstance(one, JITFunction))

    @triton.jit
    def theirs(x):  # type: ignore[no-untyped-def]
        pass

    with evidence.counted() as seen:
        for one in (theirs, ours):
            with pytest.raises(Exception, match=r".+"):  # there is no GPU, or no argument
                one[(1,)]()
        assert seen.count == 1


def test_a_fallback_in_a_case_is_a_refusal(tmp_path: Path) -> None:
    def fall_back(note: Callable[..., None]) -> dict[str, Any]:
        raise NoKernel("Attention would run as plain PyTorch on this GPU.", found="head size 8")

    assert ran(fall_back, tmp_path) == {"status": "refused", "reason": "head size 8"}


def test_layers_that_are_not_fused_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "use_fused_layers", lambda *_, **__: False)
    with pytest.raises(Refused, match="of a Decoder are not fused"):
        layers.check_model("bf16", lambda **_: None, "cpu", (32, 48, 2, 4, 2, 16))
