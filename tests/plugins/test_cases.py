"""No kernel is missing where the proofs look for them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the extra triton is not installed")

from tests.plugins.cases import kernels


def test_every_kernel_is_registered() -> None:
    sources = (path.read_text() for path in (Path(__file__).parents[2] / "plugins").glob("*/triton/*.py"))
    found = [name for source in sources for name in re.findall(r"^def (\w+_kernel)\(", source, re.MULTILINE)]
    assert sorted(kernels()) == sorted(found)
    assert all(kernel.launches for kernel in kernels().values())
