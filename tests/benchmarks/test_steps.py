"""The record of steps repeats itself, and another seed is another record."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.steps import record
from d2sd.runtime.sampling_params import SamplingParams
from tests.runtime.helpers import honest, make_engine, some_requests


@pytest.mark.slow
def test_steps_repeat_and_differ_with_the_seed() -> None:
    requests = some_requests()[:4]
    first = record(make_engine(honest(), "hybrid"), requests)
    assert record(make_engine(honest(), "hybrid"), requests) == first
    assert all(sum(step[0] for step in one["steps"]) >= len(one["answer"]) for one in first)
    hot = [replace(request, sampling=SamplingParams(1.0, seed=99)) for request in requests]
    assert record(make_engine(honest(), "hybrid"), hot) != first
