"""Captured steps of fused hybrids, whose ops are the specifications: token for token plain decoding by their layers."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import Tensor

from d2sd.modeling.config import Family
from d2sd.modeling.fused import FusedLayers, fuse
from d2sd.modeling.mixers import delta_net
from d2sd.plugins import delta_rule
from d2sd.plugins.delta_rule import DeltaRows
from d2sd.policies import PolicyName
from d2sd.runtime.request import Request
from d2sd.runtime.sampling_params import SamplingParams
from tests.conftest import fuse_anywhere
from tests.runtime.helpers import BLOCK, all_pages, free_pages, make_engine
from tests.runtime.oracle import plain_text
from tests.runtime.recorded_graphs import RecordedGraphs
from tests.tiny import runner_of, tiny_decoder, tiny_drafter

KINDS = SamplingParams(seed=1), SamplingParams(1.0, seed=2), SamplingParams(0.8, top_p=0.9, seed=3)
#: Of one token to several chunks; the last has a prefix of the one before it.
PROMPTS = (5,), tuple(range(11, 20)), (*range(11, 20), 4, 4)


@torch.library.custom_op("d2sd_tests::commit", mutates_args=("states",))
def commit_rows(
    k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor, slots: Tensor, path: Tensor, count: Tensor
) -> None:
    """`commit_delta_rule` as one operator: its specification reads slots and counts on the host."""
    delta_rule.commit_delta_rule(DeltaRows(k, v, g, beta), states, slots, path, count)


def commit(rows: DeltaRows, *given: Tensor) -> None:
    commit_rows(rows.k, rows.v, rows.g, rows.beta, *given)


@pytest.mark.parametrize(
    ("family", "policy"),
    [
        ("qwen3_5_text", "d2sd"),
        *(
            pytest.param(family, policy, marks=pytest.mark.full)
            for family, policy in (
                ("qwen3_5_text", "off"), ("qwen3_5_text", "hybrid"), ("qwen3_5_moe_text", "d2sd"),
                ("qwen3_next", "d2sd"), ("lfm2", "hybrid"),
            )
        ),
    ],
)  # fmt: skip
@pytest.mark.slow
def test_steps_are_replayed(family: Family, policy: PolicyName, monkeypatch: pytest.MonkeyPatch) -> None:
    """All memory is overwritten in between. Outputs are the closed form, as on CUDA; experts run again, because their
    rows are found on the host.
    """
    target = tiny_decoder(family, head_dim=16)
    first = tiny_drafter(target.config, block_size=BLOCK, layers=1)
    second = tiny_drafter(target.config, block_size=BLOCK, layers=1, role="variable_prefix", seed=2)
    requests = [Request(prompt, 12, kind) for prompt, kind in zip(PROMPTS, KINDS, strict=True)]
    expected = [plain_text(target, one.prompt, one.sampling, one.max_new_tokens) for one in requests]
    monkeypatch.setattr("d2sd.plugins.cpu.library.available", lambda: False)  # which hides its operators
    fuse_anywhere(monkeypatch)
    monkeypatch.setattr(delta_net, "tree_delta_rule", lambda *a, exact: delta_rule.tree_delta_rule(*a))
    monkeypatch.setattr(delta_net, "commit_delta_rule", commit)
    fused = deepcopy(target)
    fuse(fused)
    assert isinstance(fused.compiled, FusedLayers)
    runner, graphs = runner_of(fused, first, second), RecordedGraphs(rerun=family != "qwen3_5_text")
    engine = graphs.guard(make_engine(runner, policy, max_batch=2))
    assert [sequence.answer for sequence in engine.generate(requests)] == expected
    assert graphs.replays == engine.stats.steps > 5
    assert free_pages(engine) == all_pages(engine)
