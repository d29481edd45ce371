"""Chooses the implementation of ops in place of `dispatch.use_kernels`."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

from d2sd.plugins import dispatch


def run_kernels(patch: pytest.MonkeyPatch, *ops: str, on: bool = True) -> None:
    """Run these ops, and all that fall back with them, on their kernels, or, with `on` false, never; others as before.

    "trees" are all ops of the folder, "layer_ops.linear" is one.
    """
    for op in ops:
        import_module(f"d2sd.plugins.{op.split('.')[0]}")
    chosen = {op.what for name, op in dispatch.OPS.items() if name in ops or op.folder in ops}
    before = dispatch.use_kernels

    def use(op: str, x: Any, **given: Any) -> bool:
        return on if op in chosen else before(op, x, **given)

    patch.setattr(dispatch, "use_kernels", use)
