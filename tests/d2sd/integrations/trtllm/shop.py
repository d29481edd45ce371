"""A tiny bundle, a server around the stand-in, and what d2sd's own runtime says of the same requests."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from d2sd.build.pipeline import build
from d2sd.convert.checkpoint.hf_config import HFConfig
from d2sd.convert.kinds import DFLASH
from d2sd.convert.trtllm.llm_args import tree_arguments
from d2sd.integrations.trtllm.register import POLICY, SINGLE_PROCESS, register
from d2sd.modeling.decoder import Decoder
from d2sd.modeling.drafters.interface import DraftModel
from d2sd.recipe import Policy as RecipePolicy
from d2sd.recipe import Recipe, load_recipe
from d2sd.runtime.decode import StepTrace
from d2sd.runtime.engine import Engine
from d2sd.runtime.request import Limits
from d2sd.runtime.request import Request as OwnRequest
from d2sd.runtime.speculation.calibration import Calibration
from d2sd.runtime.speculation.policy import Policy
from tests.convert.helpers import write_project
from tests.d2sd.integrations.trtllm.standin import modules as standin
from tests.d2sd.integrations.trtllm.standin.batcher import Request, Server, Settings
from tests.tiny import runner_of, tiny_decoder, tiny_drafter

LONGEST = 96


@dataclass(frozen=True)
class Shop:
    """The models of a tiny bundle, on disk as well."""

    bundle: Path
    decoder: Decoder
    first: DraftModel
    second: DraftModel
    recipe: Recipe
    longest: int = LONGEST  # prompt and answer, in tokens

    def arguments(self, padding: int = 0, **changes: Any) -> tuple[dict[str, Any], Policy]:
        """The bundle's `speculative_config`, and the policy of its trees, which leave `padding` nodes unused."""
        values, policy = tree_arguments(HFConfig.read(self.bundle / "drafter_first"), self.recipe, **changes)
        speculative = values["speculative_config"]
        speculative["max_total_draft_tokens"] += padding
        speculative["dynamic_tree_max_topK"] += padding
        return speculative | {"speculative_model": str(self.bundle / "drafter_first")}, policy

    def server(self, modules: dict[str, Any], settings: Settings, **changes: Any) -> Server:
        """A server of the bundle, which is registered."""
        return Server(modules, self.decoder, self.arguments(**changes)[0], self.longest, settings)

    def own(self, requests: list[Request], policy: Policy, calibration: Calibration | None = None) -> list[Request]:
        """The served requests again in d2sd's own runtime, each alone: answers, and tokens of every step.

        TensorRT-LLM's context step says the first token, with which d2sd's prompt ends: its anchor.
        """
        runner = runner_of(self.decoder, self.first, self.second)
        found = []
        for request in requests:
            limits = Limits(1, self.longest + 64, 4, 64, prefix_cache=False)
            engine = Engine(runner, policy, limits, calibration=calibration)
            engine.record_trace = True
            prompt, counts = request.tokens[: len(request.prompt) + 1], list[int]()
            sequence = engine.submit(OwnRequest(tuple(prompt), max(request.new_tokens - 1, 1)))
            while sequence.finish is None and request.new_tokens > 1:
                counts += stepped(engine)
            found.append(Request(request.prompt, request.new_tokens, tokens=list(sequence.tokens), counts=counts))
        return found


def stepped(engine: Engine) -> list[int]:
    """Step an engine of one request; the tokens of its decode step, if it made one."""
    engine.trace = None
    engine.step()
    trace: StepTrace | None = engine.trace
    return [] if trace is None else [int(trace.accepted.count[0])]


def make_shop(
    folder: Path,
    *,
    seed: int = 3,
    vocab: int = 24,
    block_size: int = 5,
    branches: int = 4,
    policy: RecipePolicy = "hybrid",
    second: bool = True,
    rows: int = 64,
    lookup: bool = True,
) -> Shop:
    """Random models of a target with few tokens, so that random drafters are right now and then."""
    decoder = tiny_decoder(vocab=vocab, seed=seed, layers=2)
    one = tiny_drafter(decoder.config, block_size=block_size, layers=1, seed=seed + 1)
    two = tiny_drafter(decoder.config, role="variable_prefix", block_size=block_size, seed=seed + 2)
    drafters = {"first": {"path": "first"}} | ({"second": {"path": "second"}} if second else {})
    tree = {"policy": policy, "block_size": block_size, "branches": branches, "row_budget": rows, "lookup": lookup}
    path = write_project(folder / "project", decoder, drafters=drafters, tree=tree, limits=_limits(), precision="fp32")
    for name, drafter in (("first", one), ("second", two)):
        DFLASH.write(path.parent / name, drafter.config, drafter.state_dict())
    build(load_recipe(path), folder / "bundle", validate=False)
    return Shop(folder / "bundle", decoder, one, two, load_recipe(path))


def _limits() -> dict[str, int]:
    return {"max_batch": 4, "max_context": LONGEST, "page_size": 4}


def registered(
    monkeypatch: pytest.MonkeyPatch, bundle: Path, policy: str | None = None, version: str = "1.4.0rc1"
) -> dict[str, Any]:
    """The stand-in, with the tree of `bundle` registered."""
    modules = standin.install(monkeypatch, version)
    single_process(monkeypatch)
    if policy is not None:
        monkeypatch.setenv(POLICY, policy)
    register(bundle)
    return modules


def single_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SINGLE_PROCESS, "1")
    monkeypatch.delenv(POLICY, raising=False)


def random_requests(dice: random.Random, count: int, vocab: int, longest: int = 18) -> list[Request]:
    """Prompts of 1 to 12 tokens that arrive over some steps."""
    return [
        Request(
            [dice.randrange(vocab) for _ in range(dice.randint(1, 12))],
            dice.randint(1, longest),
            arrives=dice.randint(0, 6),
        )
        for _ in range(count)
    ]
