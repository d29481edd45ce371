"""The plan of one of several GPUs: bytes of the tensors that a rank loads, and what capacity makes of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from d2sd.bench.capacity import Lengths, make_sheet
from d2sd.build.plan import make_plan
from d2sd.build.shares import of_one_gpu, step_bytes
from d2sd.build.tables import shared_lines
from d2sd.convert.checkpoint.target import load_target
from d2sd.errors import D2SDError
from d2sd.modeling.config import Family
from d2sd.modeling.shard import Shard
from d2sd.recipe import load_recipe
from tests.convert.helpers import write_project
from tests.tiny import tiny_decoder


@pytest.mark.parametrize(
    ("family", "tie", "size"), [("qwen2", True, 2), ("qwen2", False, 4), ("qwen3_moe", False, 2), ("gpt_oss", False, 4)]
)
def test_bytes_are_those_of_a_rank(family: Family, tie: bool, size: int, tmp_path: Path) -> None:
    """Four ranks of two K/V heads: each has a whole one."""
    recipe = load_recipe(write_project(tmp_path, tiny_decoder(family, tie=tie)))
    plan = make_plan(recipe)
    own = of_one_gpu(plan, size)
    part = load_target(tmp_path / "target", torch.float32, Shard(0, size))
    assert own.target is not None
    assert plan.target is not None
    assert own.target.weight_bytes == sum(tensor.nbytes for tensor in part.state_dict().values())
    assert own.target.parameters == sum(tensor.numel() for tensor in part.state_dict().values())
    assert own.target.kv_token_bytes == plan.target.kv_token_bytes // 2
    assert own.drafters == plan.drafters
    assert step_bytes(own, 3, 5) == 4 * (2 * 3 * 3 * 32 + 8 * 64)


def test_a_plan_shows_the_numbers_that_divide(tmp_path: Path) -> None:
    lines = dict(shared_lines(make_plan(load_recipe(write_project(tmp_path)))))
    assert list(lines) == ["2 GPUs", "4 GPUs"]
    assert "each; to verify 16 rows they exchange" in lines["2 GPUs"]


def test_capacity_is_of_one_of_several_gpus(tmp_path: Path) -> None:
    plan = make_plan(load_recipe(write_project(tmp_path)))
    lengths = Lengths(prompt_tokens=20, output_tokens=30)
    one, two = (make_sheet(of_one_gpu(plan, size), tmp_path, "H100", lengths, None, "off") for size in (1, 2))
    assert two.options[0].weight_bytes < one.options[0].weight_bytes
    assert "2 GPUs share the target" in two.markdown()
    assert "share the target" not in one.markdown()


def test_what_cannot_be_divided_is_refused(tmp_path: Path) -> None:
    plan = make_plan(load_recipe(write_project(tmp_path)))
    with pytest.raises(D2SDError, match="4 query heads"):
        of_one_gpu(plan, 3)
    assert of_one_gpu(replace(plan, target=None), 2).target is None
