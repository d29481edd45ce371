"""Kernels are launched while those before still run, where the device can do that, and touch nothing until they wait.

Order in machine code, for every variant and architecture: `benchmarks/compile_kernels.py`.
"""

from __future__ import annotations

import runpy

import pytest
import torch

pytest.importorskip("triton", reason="the extra triton is not installed")

from d2sd.plugins.handover import begin
from d2sd.plugins.shared import dependent_launch
from d2sd.plugins.shared.dependent_launch import NO_DEPENDENT_LAUNCH, DependentKernel, without_dependent_launch
from tests.plugins.cases import checks, kernels
from tests.plugins.kernels import calls
from tools.ptxsim.launch import Edit, Launch, executed_as_ptx
from tools.ptxsim.order import Fault

WAIT, LET_IN = "griddepcontrol.wait", "griddepcontrol.launch_dependents"


def launched(capability: int) -> Launch:
    """One launch of a small kernel."""
    number, flag = torch.ones(1, dtype=torch.long), torch.ones(1, dtype=torch.bool)
    with executed_as_ptx(capability) as launches:
        begin.triton(number, number, flag, ~flag, number * 0, torch.zeros(3, 1, dtype=torch.long))
    (launch,) = launches
    return launch


@pytest.mark.parametrize("capability", [80, 89, 90, 100, 120])
def test_by_capability(capability: int) -> None:
    launch = launched(capability)
    assert launch.dependent == (capability >= 90)
    threads_wait, let_in = launch.counts[WAIT], launch.counts[LET_IN]
    assert (threads_wait, let_in) == ((1, 1) if capability >= 90 else (0, 0))


def test_without() -> None:
    """The instructions stay: they do nothing where a launch is not dependent."""
    with without_dependent_launch():
        launch = launched(90)
    assert not launch.dependent
    assert launch.counts[WAIT] == 1
    assert launched(90).dependent


def test_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable is read once, when kernels are loaded."""
    for value, expected in (("1", False), ("0", True)):
        monkeypatch.setenv(NO_DEPENDENT_LAUNCH, value)
        assert runpy.run_path(dependent_launch.__file__)["_allowed"].get() == expected


@pytest.mark.parametrize("name", kernels())
def test_every_kernel_may_be_launched_so(name: str) -> None:
    assert isinstance(kernels()[name].kernel, DependentKernel)


def without_wait(kernel: str) -> Edit:
    return lambda name, ptx: ptx.replace(f"{WAIT};", "") if name == kernel else ptx


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        (name, f"{kernel}_kernel")
        for name, check in checks().items()
        for kernel in check.kernels.split()
        if f"{kernel}_kernel" in kernels()
    ],
)
def test_a_kernel_that_does_not_wait_faults(name: str, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "DEVICE", "cpu")
    with pytest.raises(Fault, match=f"dependent launch before {WAIT}"), executed_as_ptx(90, without_wait(kernel)):
        checks()[name].run(monkeypatch=monkeypatch)
