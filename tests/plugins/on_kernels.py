"""Chooses the implementation of ops in place of `dispatch.use_kernels`."""

from __future__ import annotations

from typing import Any

import pytest

from d2sd.plugins import dispatch


def run_kernels(patch: pytest.MonkeyPatch, *ops: str, on: bool = True) -> None:
    """Run these ops (every `OP`) on their kernels, or, with `on` false, never; others as before."""
    before = dispatch.use_kernels

    def chosen(op: str, x: Any, **given: Any) -> bool:
        return on if op in ops else before(op, x, **given)

    patch.setattr(dispatch, "use_kernels", chosen)
