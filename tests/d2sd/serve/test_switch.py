"""`speculative` in a request, by every face: no answer depends on it, and what it holds is counted."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from d2sd import LLM, SamplingParams
from d2sd.bundle.load import Bundle
from d2sd.bundle.serving import make_engine
from d2sd.errors import RequestError
from d2sd.serve.dynamo.requests import RequestReader
from d2sd.serve.triton.requests import read_call
from tests.d2sd.serve.http import serving

SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 6}
CHAT = {"messages": [{"role": "user", "content": "w5 w7"}], "max_tokens": 24, **SAMPLED}
BODIES = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": [5, 7, 9], "max_tokens": 24, **SAMPLED},
    "/v1/responses": {"input": "w5 w7", "max_output_tokens": 24, **SAMPLED},
}


def test_requests_with_and_without_speculation_beside_each_other(bundle: Bundle) -> None:
    """Half of a batch verifies a row a step; the metrics say how many rows and steps each switch had."""
    asked = [True, False, {"policy": "hybrid"}, {"policy": "off"}] * 2
    engine = make_engine(bundle, policy="hybrid", max_batch=8)
    with serving(bundle.path, engine) as server:

        def send(path: str, switch: Any) -> Any:
            answer = server.http.post(path, json=BODIES[path] | {"speculative": switch}).json()
            return next(str(answer[key]) for key in ("choices", "output") if key in answer)

        for path in BODIES:
            with ThreadPoolExecutor(8) as threads:
                found = [*threads.map(lambda switch, path=path: send(path, switch), asked)]
            texts = [re.sub(r"'id': '[^']*'", "", one) for one in found]
            assert len({*texts}) == 1, path
        told = server.http.get("/metrics").text
    counts = re.findall(r'^d2sd_speculative_(\w+)_total\{model_name="tiny",switch="(\w+)"\} ([\d.]+)$', told, re.M)
    by = {(name, switch): float(count) for name, switch, count in counts}
    assert [by["requests", switch] for switch in ("on", "off", "hybrid")] == [6, 12, 6]
    assert by["rows", "off"] == by["steps", "off"] == 12 * 24
    for switch in ("on", "hybrid"):
        assert by["rows", switch] == 16 * by["steps", switch]


@pytest.mark.parametrize("path", BODIES)
def test_what_the_bundle_cannot_serve_is_refused_with_what_it_can(bundle: Bundle, path: str) -> None:
    with serving(bundle.path, make_engine(bundle, policy="ddtree")) as server:
        for name in ("hybrid", "d2sd", "flex_parallel", "no such"):
            refused = server.http.post(path, json=BODIES[path] | {"speculative": {"policy": name}})
            error = refused.json()["error"]
            assert (refused.status_code, error["param"]) == (400, "speculative.policy")
            assert "expected: off, lookup, chain, reanchor, ddtree" in error["message"]
        wrongs: list[Any] = ["off", {}, {"policy": 1}, {"rows": 1}, 1, []]
        for wrong in wrongs:
            refused = server.http.post(path, json=BODIES[path] | {"speculative": wrong})
            assert refused.status_code == 400, wrong
            assert "speculative" in refused.json()["error"]["message"]


def test_the_python_api_has_it(tiny_bundle: Path) -> None:
    with LLM(tiny_bundle, policy="hybrid", max_batch=4) as llm:
        switches: list[Any] = [True, False, {"policy": "chain"}, {"policy": "off"}]
        params = [SamplingParams(1.0, seed=3, max_tokens=20, speculative=switch) for switch in switches]
        found = llm.generate(["w5 w7"] * 4, params)
        assert len({one.text for one in found}) == 1
        rows = [one.stats.verified_nodes / one.stats.steps for one in found]
        assert rows[1] == rows[3] == 1 < min(rows[0], rows[2])
        (alone,) = llm.generate(["w5 w7"], SamplingParams(max_tokens=20, speculative={"policy": "chain"}))
        assert alone.stats.policies.keys() == {"chain of 4 rows"}
        with pytest.raises(RequestError, match="expected: off, lookup, chain, reanchor, d2sd, ddtree, hybrid"):
            llm.generate(["w5"], SamplingParams(speculative={"policy": "best"}))


def test_triton_and_dynamo_have_it(bundle: Bundle) -> None:
    text = {"text_input": np.array([b"w5"], np.object_)}
    for given, asked in (
        ({"sampling_param_speculative": np.array([False])}, False),
        ({"sampling_parameters": np.array([b'{"speculative": {"policy": "chain"}}'], np.object_)}, {"policy": "chain"}),
        ({}, None),
    ):
        body = read_call(text | given, {}).body
        assert body is not None
        assert body.speculative == asked
    reader = RequestReader(bundle, 60)
    switches = {"token_ids": None, "speculative:false": "off", 'speculative:{"policy": "chain"}': "chain"}
    for switch, policy in switches.items():
        assert reader.read({"token_ids": [3], "annotations": ["llm_metrics", switch]}).policy == policy
    for broken in (
        'speculative:"off"',
        "speculative:off",
        "speculative:",
        "speculative",
        "speculative:NaN",
        "speculative:" + 100_000 * "[",
    ):
        with pytest.raises(RequestError, match="speculative"):
            reader.read({"token_ids": [3], "annotations": [broken]})
