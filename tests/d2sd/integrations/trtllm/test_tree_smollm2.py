"""SmolLM2 and its trained pair in the stand-in's path, in fp32: plain greedy text, steps as of d2sd's own runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from d2sd.bundle.load import load_bundle
from d2sd.bundle.requests import chat_request
from d2sd.convert.checkpoint.target import load_target
from d2sd.convert.kinds import load_drafter
from d2sd.policies import DrafterRole
from d2sd.recipe import load_recipe
from d2sd.runtime.sampling_params import SamplingParams
from tests.d2sd.integrations.trtllm.shop import Shop, registered
from tests.d2sd.integrations.trtllm.standin.batcher import Request, Settings
from tests.d2sd.integrations.trtllm.test_tree_serving import same_steps

PROMPTS = (
    "Write a Python function that checks whether a string is a palindrome.",
    "What is the capital of France, and what is it known for?",
    "Repeat this list, and add one item: apples, pears, plums, cherries, quinces.",
)
RECIPE = Path(__file__).parents[4] / "recipes" / "smollm2-135m.yaml"


@pytest.mark.slow
@pytest.mark.timeout(600)  # the bundle is built when the first asks for it
@pytest.mark.parametrize(
    ("policy", "sm", "nodes"), [("hybrid", 90, 64), pytest.param("d2sd", 100, 36, marks=pytest.mark.full)]
)
def test_the_trained_pair(
    smollm2_bundle: Path, monkeypatch: pytest.MonkeyPatch, policy: Any, sm: int, nodes: int
) -> None:
    bundle = load_bundle(smollm2_bundle, verify=False)
    folders = {role: smollm2_bundle / role.folder for role in (DrafterRole.FIRST, DrafterRole.SECOND)}
    drafters = {role: load_drafter(folder, torch.float32) for role, folder in folders.items()}
    target = load_target(smollm2_bundle / "target", torch.float32)
    shop = Shop(
        smollm2_bundle, target, drafters[DrafterRole.FIRST], drafters[DrafterRole.SECOND], load_recipe(RECIPE), 256
    )
    modules = registered(monkeypatch, smollm2_bundle, policy)
    settings = Settings(slots=2, chunk=24, sm=sm, tokens_per_block=32)
    server = shop.server(modules, settings, nodes=nodes, max_batch=2)
    asked = [chat_request(bundle, text, SamplingParams(), 24) for text in PROMPTS]
    requests = [Request(list(one.prompt), 24, arrives=place) for place, one in enumerate(asked)]
    server.run(requests)
    assert not server.worker.drafting_failed
    same_steps(requests, shop.own(requests, server.drafters.policy, server.drafters.calibration))
    counts = [count for request in requests for count in request.counts]
    assert sum(counts) / len(counts) > 2
