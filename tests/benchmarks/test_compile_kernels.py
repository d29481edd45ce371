"""A small part of `make kernels`: kernels become machine code without a GPU, within the bounds they are held to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="the extra triton is not installed")

from benchmarks import compile_kernels
from benchmarks.ahead_of_time import Compiled, bind, compile_kernel
from tests.plugins.cases import kernels


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept results of lanes go to a folder of the test, so that no test changes a lane's."""
    monkeypatch.setattr(compile_kernels, "KEPT", tmp_path / "kept.json")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "argument"),
    [("attention bf16/fp8 D=128 rows=256 split to fp8", "k_pages"), ("exact product fp8 sums", "weight")],
)
def test_kernels_compile_within_bounds(name: str, argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    """For Hopper: verification over FP8 pages, and the product of exact mode; loops held to the rules of their code."""
    assert compile_kernels.main(["--only", name, "--capability", "90", "--again"]) == 0
    printed = capsys.readouterr().out
    assert "1 keep every rule, 0 unchanged since; 0 break a bound or a rule" in printed
    assert argument in printed


def test_nothing_compiled_is_no_success() -> None:
    assert compile_kernels.main(["--only", "no such kernel"]) == 1


def test_what_has_not_changed_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch is compiled again if its sources, arguments or rules differ, or if it broke a rule."""
    seen, bad = list[str](), [1]

    def checked(name: str, capabilities: tuple[int, ...]) -> tuple[list[str], int, int]:
        seen.append(name)
        return [], len(capabilities), bad[0]

    monkeypatch.setenv("WORKERS", "1")
    monkeypatch.setattr(compile_kernels, "checked", checked)
    one, again = "merge 8x16 to 64", ["--only", "merge 8x16 to 64"]
    assert compile_kernels.main(again) == 1
    bad[0] = 0
    assert compile_kernels.main([*again, "--capability", "90"]) == 0
    assert compile_kernels.main(again) == 0
    assert seen == [one] * 3
    assert compile_kernels.main(again) == 0
    assert seen == [one] * 3
    key = compile_kernels.keys([one])
    monkeypatch.setattr(compile_kernels, "RULES", ("compile_kernels.py",))
    assert compile_kernels.keys([one]) != key
    assert compile_kernels.main(again) == 0
    assert seen == [one] * 4


def test_bounds_are_bounds() -> None:
    broken, most = compile_kernels.broken, compile_kernels.MOST_SHARED
    size: dict[str, Any] = {"shared": most[90], "scratch": 0, "registers": 255, "spilled": 0, "dependent": True}
    good = Compiled("kernel", "", b"", tuple("abcdefg"), 4, 9, **size)
    assert broken("", good, 90) == []
    faults: tuple[dict[str, Any], ...]
    faults = ({"shared": most[90] + 1}, {"spilled": 4}, {"scratch": 8}, {"parameters": 8}, {"dependent": False})
    for fault in faults:
        assert len(broken("", replace(good, **fault), 90)) == 1
    assert broken("", good, 120)


def test_the_table_of_block_sizes_is_covered() -> None:
    """Every head size and type, with and without splits, on every architecture that has the type."""
    names = kernels()["cascade_attention_kernel"].launches
    for kind in ("bf16", "bf16/fp8", "fp16", "fp32"):
        for size in (64, 96, 128, 256):
            found = [name for name in names if name.startswith(f"attention {kind} D={size} ")]
            assert any(name.endswith("split") for name in found)
            assert any(not name.endswith("split") for name in found)


@pytest.mark.parametrize("name", kernels())
def test_every_launch_binds_its_kernel(name: str) -> None:
    for run in kernels()[name].launches.values():
        assert bind(kernels()[name].kernel, run, 90).warps > 0


def test_what_is_compiled_is_what_the_launcher_hands_over() -> None:
    """A merge of candidates: types of all arguments, constants by the shapes, and warps."""
    merge = kernels()["candidates_kernel"]
    bound = bind(merge.kernel, merge.launches["merge 8x16 to 64"], 90)
    numbers = dict.fromkeys(("candidate", "tokens", "parent", "depth", "branch_id", "num_merged"), "*i64")
    assert bound.types == numbers | {"path_score": "*fp32", "score": "*fp32", "valid": "*u1", "attn_mask": "*u1"}
    assert bound.constants == {"C": 8, "G": 16, "CP": 8, "GP": 16, "N": 64, "NP": 64, "TILE": 64}
    assert bound.warps == 4


def test_warps_may_depend_on_the_architecture() -> None:
    attention = kernels()["cascade_attention_kernel"]
    run = attention.launches["attention bf16 D=256 rows=256"]
    assert [bind(attention.kernel, run, capability).warps for capability in (89, 90)] == [4, 8]


def test_what_is_compiled_is_specialised_as_served() -> None:
    """A vocabulary of 151,936 is a multiple of 16 to the compiler, so logits are loaded 16 bytes at a time."""
    segments = kernels()["segments_kernel"]
    done = compile_kernel(segments.kernel, segments.launches["segments 1 of 151936"], 90)
    assert done.names == ("logits", "maxima", "partial", "vocab")
    assert "ld.global.v4.b32" in done.ptx
