"""How calls of the attention kernel are executed as PTX, and those that every change runs."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from d2sd.plugins.cascade_attention import pack_mask_bits
from d2sd.plugins.cascade_attention.triton.launch import launch
from tests.plugins.cascade_attention.cases import Attention
from tests.plugins.cases import TYPES
from tests.plugins.kernels.calls import in_fp8, read_back
from tests.plugins.test_cascade_attention import Call, Shape, ancestors, behind, make, steps
from tools.ptxsim.launch import Edit, Launch, executed_as_ptx

#: A100, L4 and L40, H100 and H200, RTX 50 and RTX PRO. B200, 100, is in test_blackwell.py.
CAPABILITIES = (80, 89, 90, 120)


def call_of(case: Attention) -> Call:
    """One K/V head; random numbers and trees; NaN in every slot of the pages that no request owns."""
    shape = Shape(contexts=case.contexts, rows=case.rows, kv_heads=1, group=case.group, size=case.size, page_size=16)
    call = make(shape, ancestors).to(TYPES[case.kind])
    call = behind(call, case.window, steps(ancestors, call), sinks=case.sinks)
    return in_fp8(call, torch.tensor(0.011), torch.tensor(0.007)) if case.fp8 else call


def run(
    case: Attention, capability: int, call: Call | None = None, edit: Edit | None = None, limit: int = 3_000_000
) -> tuple[Tensor, Tensor, Call, list[Launch]]:
    """Return the PTX's result, the specification's result, the call over plain pages, and the launches."""
    call = call or call_of(case)
    plain = read_back(call) if case.fp8 else call
    with executed_as_ptx(capability, edit, limit) as launches:
        mask = call.mask
        words = pack_mask_bits(mask.allowed)
        found = launch(
            call.q, call.k, call.v, call.context, words, splits=case.splits, first=mask.first, sinks=call.sinks
        )
    return found, plain.run(), plain, launches


def least_capability(case: Attention) -> int:
    return 89 if case.fp8 else 80


#: What `make test` runs: Hopper's products and an older architecture's, small.
SMALL = (
    (90, Attention("bf16", 64, 16, contexts=(70, 5))),
    (80, Attention("fp16", 32, 8, 2, contexts=(40, 0))),
    (80, Attention("bf16", 32, 5, 2, contexts=(100, 9), window=30, sinks=True)),
)
#: What CI runs in addition: each architecture, each kind of page, splits and the merge.
MIDDLE = (
    (90, Attention("bf16", 128, 16)),
    (90, Attention("bf16", 128, 16, fp8=True)),
    (90, Attention("bf16", 128, 1, 4)),
    (90, replace(Attention("fp16", 96, 16), contexts=(33,))),
    (80, Attention("bf16", 128, 16)),
    (89, Attention("bf16", 64, 8, 4, fp8=True)),
    (120, Attention("fp16", 128, 16, fp8=True)),
    (120, Attention("fp32", 64, 3, 4)),
    (90, Attention("bf16", 64, 16, window=40, sinks=True)),
    (120, Attention("fp16", 128, 8, 4, fp8=True, window=5)),
)
