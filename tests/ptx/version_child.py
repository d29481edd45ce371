"""Run by test_versions.py with another Triton: does its attention kernel fault on Hopper? Prints one line."""

from __future__ import annotations

import sys

import triton  # type: ignore[import-untyped]

from tests.plugins.cascade_attention.cases import Attention
from tests.plugins.kernels.calls import assert_within_budget
from tests.ptx.cases import run
from tools.ptxsim.order import Fault


def main() -> None:
    try:
        found, expected, plain, _ = run(Attention("bf16", int(sys.argv[1]), 16), 90)
        assert_within_budget(found, expected, plain)
    except Fault as fault:
        print(triton.__version__, "fault:", fault)
    else:
        print(triton.__version__, "no fault")


if __name__ == "__main__":
    main()
