"""A launch that is kept ends as it did without being executed, and one that is another in anything is executed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the extra triton is not installed")

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from tools.ptxsim import kept, program
from tools.ptxsim import launch as launches
from tools.ptxsim.launch import Edit, Launch, executed_as_ptx
from tools.ptxsim.order import Fault


@triton.jit  # type: ignore[untyped-decorator]
def raised_kernel(x, out, by, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """out[n] = x[n] + by."""
    n = tl.arange(0, SIZE)
    tl.store(out + n, tl.load(x + n) + by)


class Executions:
    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self.original = 0, program.execute
        monkeypatch.setenv(kept.FOLDER, str(folder))
        monkeypatch.setattr(launches, "execute", self.execute)

    def execute(self, *arguments: Any, **options: Any) -> Any:
        self.count += 1
        return self.original(*arguments, **options)

    def run(self, x: Tensor, by: int = 3, capability: int = 90, edit: Edit | None = None) -> tuple[Tensor, Launch]:
        with executed_as_ptx(capability, edit) as found:
            out = torch.empty(32, dtype=torch.long)
            raised_kernel[(1,)](x, out, by, 32, num_warps=1)
        return out, found[0]


@pytest.fixture
def executions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Executions:
    return Executions(tmp_path, monkeypatch)


def test_the_same_launch_is_executed_once(executions: Executions) -> None:
    (first, told), (again, told_again) = (executions.run(torch.arange(32)) for _ in range(2))
    assert executions.count == 1
    assert first.tolist() == again.tolist() == list(range(3, 35))
    assert told == told_again
    assert told.counts["st.global.v2.b64"] + told.counts["st.global.b64"] > 0


def test_what_differs_in_anything_is_executed(executions: Executions, monkeypatch: pytest.MonkeyPatch) -> None:
    x, size = torch.arange(33), 0
    views = x[:32], x[1:], x[:32].clone() * 2
    for count, (tensor, by, capability) in enumerate(
        [(views[0], 3, 90), (views[1], 3, 90), (views[2], 3, 90), (views[0], 5, 90), (views[0], 3, 80)], 1
    ):
        out, _ = executions.run(tensor, by, capability)
        assert torch.equal(out, tensor + by)
        assert executions.count == count
        size = count
    monkeypatch.setattr(kept, "_simulator", lambda: "another")
    executions.run(views[0])
    assert executions.count == size + 1


def test_a_fault_is_kept_with_its_words(executions: Executions) -> None:
    said = []
    for _ in range(2):
        with pytest.raises(Fault) as fault:
            executions.run(torch.arange(32)[:16])
        said.append(str(fault.value))
    assert executions.count == 1
    assert said[0] == said[1]
    assert said[0].startswith("global read out of bounds")


def test_line_numbers_are_nothing_to_it(executions: Executions) -> None:
    executions.run(torch.arange(32))
    executions.run(torch.arange(32), edit=lambda name, ptx: ptx.replace("\t.loc\t", "\t.loc\t1"))
    assert executions.count == 1
    with pytest.raises(Fault, match="out of bounds"):
        executions.run(torch.arange(32), edit=lambda name, ptx: ptx.replace("add.s64", "sub.s64"))
    assert executions.count == 2
