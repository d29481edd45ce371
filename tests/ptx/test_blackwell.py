"""B200 (sm_100): which kernels can be executed. Tiles of 64 rows use tcgen05 and tensor memory, which are not modelled;
all others multiply with mma.sync, as on older architectures.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton", reason="the extra triton is not installed")

from tests.plugins.cascade_attention.cases import Attention, executed
from tests.plugins.kernels.calls import assert_within_budget
from tests.ptx.cases import run
from tools.ptxsim.parse import Unsupported


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("case", list(executed()), ids=str)
def test_attention_on_blackwell(case: Attention) -> None:
    if case.tile(100).rows >= 64:
        with pytest.raises(Unsupported, match=r"tcgen05\.alloc"):
            run(replace(case, contexts=(20,)), 100)
        return
    found, expected, plain, launches = run(case, 100)
    assert_within_budget(found, expected, plain)
    assert not any(name.startswith("tcgen05") for name in launches[0].counts)
