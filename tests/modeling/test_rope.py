"""Rotary embedding: the numbers of real checkpoints, and precision at far positions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from d2sd.modeling.config import RopeConfig
from d2sd.modeling.layers import Rotary, inverse_frequencies, rotate
from tests.tiny import tiny_decoder


@pytest.mark.parametrize(
    ("rope", "head_dim", "theirs"),
    [
        pytest.param(
            RopeConfig(500000.0, "linear", factor=2.0), 64, {"rope_type": "linear", "factor": 2.0}, id="linear"
        ),
        pytest.param(
            RopeConfig(500000.0, "llama3", 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0),
            128,
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "original_max_position_embeddings": 8192,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            },
            id="Llama-3.1-8B",
        ),
        pytest.param(
            RopeConfig(500000.0, "llama3", 32.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0),
            64,
            {
                "rope_type": "llama3",
                "factor": 32.0,
                "original_max_position_embeddings": 8192,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            },
            id="Llama-3.2-1B",
        ),
        pytest.param(
            RopeConfig(1000000.0, "yarn", 4.0, 32768),
            128,
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
            id="Qwen3-8B at 131,072 tokens",
        ),
        pytest.param(
            RopeConfig(150000.0, "yarn", 32.0, 4096, truncate=False),
            64,
            {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
            id="gpt-oss",
        ),
        pytest.param(
            RopeConfig(1000000.0, turning=0.25),
            512,
            {"rope_type": "proportional", "partial_rotary_factor": 0.25},
            id="Gemma 4's layers without a window",
        ),
    ],
)
def test_frequencies_of_real_checkpoints(rope: RopeConfig, head_dim: int, theirs: dict[str, Any]) -> None:
    config = LlamaConfig(head_dim=head_dim, rope_parameters={"rope_theta": rope.theta, **theirs})
    expected, expected_scale = ROPE_INIT_FUNCTIONS[theirs["rope_type"]](config, torch.device("cpu"))
    frequencies, scale = inverse_frequencies(rope, head_dim)
    torch.testing.assert_close(frequencies, expected, rtol=1e-6, atol=0)
    assert scale == pytest.approx(expected_scale, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_angles_are_exact_at_far_positions(dtype: torch.dtype) -> None:
    """Positions and frequencies stay in fp32 when the model does not: 40,001 in bf16 is 40,192."""
    positions = torch.tensor([[0, 257, 40001]])
    cos, sin = Rotary(RopeConfig(10000.0), 8).to(dtype)(positions, dtype)
    exact = positions[..., None, None].double() / 10000.0 ** (torch.arange(0, 8, 2).double() / 8)
    exact = torch.cat([exact, exact], -1)
    assert cos.dtype == sin.dtype == dtype
    atol = 3e-3 if dtype == torch.float32 else 8e-3  # fp32 angles of 40,001 radians are good to 2e-3
    torch.testing.assert_close(cos.double(), exact.cos(), rtol=0, atol=atol)
    torch.testing.assert_close(sin.double(), exact.sin(), rtol=0, atol=atol)


def test_scores_depend_on_distance_alone() -> None:
    rotary = Rotary(RopeConfig(100.0), 8)
    q, k = torch.randn(2, 1, 1, 8, generator=torch.Generator().manual_seed(0)).unbind()

    def score(query: int, key: int) -> float:
        positions = (torch.tensor([query]), torch.tensor([key]))
        rotated = [rotate(x, rotary(p, x.dtype)) for x, p in zip((q, k), positions, strict=True)]
        return float((rotated[0] * rotated[1]).sum())

    assert score(9, 4) == pytest.approx(score(35, 30), abs=1e-5)
    assert score(9, 4) != pytest.approx(score(9, 5), abs=1e-2)


def test_frequencies_follow_the_models_device_but_not_its_dtype() -> None:
    """Moved when the model is: a copy at the first call could not be captured in a CUDA graph."""
    model = tiny_decoder()
    exact = model.rotary._frequencies.clone()
    model.to(torch.bfloat16)
    assert torch.equal(model.rotary._frequencies, exact)
    model.to("meta", torch.float16)
    assert model.rotary._frequencies.device.type == "meta"
    assert model.rotary._frequencies.dtype == torch.float32
    with torch.device("meta"):  # a model's tensors are loaded afterwards; frequencies are not part of a checkpoint
        assert torch.equal(Rotary(model.config.body.rope, 8)._frequencies, exact)
