"""A share of the responses is sampled: which ones, and how, depends on the prompts' ids alone."""

from __future__ import annotations

import pytest

from d2sd.runtime.sampling_params import SamplingParams
from d2sd.train.pipeline.responses import response_sampling
from d2sd.train_recipe import Data, SampledResponses

NAMES = [f"self/general/{n}" for n in range(2000)]


def test_without_a_share_all_are_greedy() -> None:
    assert {response_sampling(name, Data(prompts=[])) for name in NAMES} == {SamplingParams()}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("share", [0.0, 0.2, 1.0])
def test_the_share_is_kept(share: float) -> None:
    data = Data(prompts=[], sampled=SampledResponses(share=share, temperature=0.7))
    found = [response_sampling(name, data) for name in NAMES]
    sampled = [params for params in found if params.temperature]
    assert len(sampled) / len(NAMES) == pytest.approx(share, abs=0.03)
    assert {params.temperature for params in sampled} <= {0.7}
    assert len({params.seed for params in sampled}) == len(sampled)
    assert found == [response_sampling(name, data) for name in NAMES]


def test_a_larger_share_keeps_the_responses_of_a_smaller_one() -> None:
    """So that raising it in a recipe changes no response that is sampled already."""
    small, large = (Data(prompts=[], sampled=SampledResponses(share=share)) for share in (0.1, 0.3))
    few, more = ({name for name in NAMES if response_sampling(name, one).temperature} for one in (small, large))
    assert few < more
