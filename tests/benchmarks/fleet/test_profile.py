"""Step costs measured from a bundle, and the engine against the simulation that uses them."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.fleet import profile as module
from benchmarks.fleet.accepted import mean_length
from benchmarks.fleet.profile import profile
from benchmarks.fleet.replayed import check
from d2sd.bundle.load import load_bundle
from d2sd.errors import D2SDError
from tests.d2sd.serve.conftest import build_tiny


@pytest.mark.slow
def test_costs_are_measured_once_and_simulate_what_the_engine_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {"max_batch": 4, "max_context": 512, "page_size": 16, "prefill_chunk": 64}
    bundle = load_bundle(build_tiny(tmp_path, limits=limits))
    path = tmp_path / "costs.json"
    costs = profile(bundle, ["off", "chain"], path, new_tokens=8)
    assert costs.kind == "measured"
    plain, chain = costs.engines["off"], costs.engines["chain"]
    assert plain.served == dict.fromkeys((1, 2, 4), "off")
    assert mean_length(plain.policies["off"].accepted[0]) == 1
    (name,) = chain.policies
    assert len(chain.policies[name].accepted) == 24  # d2sd's own prompts
    assert all(seconds > 0 for _, seconds in plain.prefill)

    monkeypatch.setattr(module, "_measure", None)
    assert profile(bundle, ["off", "chain"], path) == costs  # read back
    monkeypatch.setattr("torch.__version__", "0")
    with pytest.raises(D2SDError, match="of another machine"):
        profile(bundle, ["off"], path)

    found = check(bundle, "off", plain, concurrency=4, requests=8, tokens=8)
    assert found.measured.tokens == found.simulated.tokens
    assert found.measured.steps == found.simulated.steps == found.measured.tokens  # plain decoding: a token a step
