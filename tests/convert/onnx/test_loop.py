"""The whole loop over FP8 graphs in ONNX Runtime writes what the models alone would have written. Of other graphs:
tests/d2sd/bundle/test_backends.py.
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest
import torch

from d2sd.convert.kinds import KINDS
from d2sd.convert.kinds.flexdraft import KIND as FLEXDRAFT
from d2sd.convert.onnx.export import export_drafter, export_target
from d2sd.modeling.decoder import Decoder
from d2sd.modeling.drafters.interface import DraftModel
from d2sd.policies import DrafterRole, PolicyName
from d2sd.runtime.backends.exported import GraphDecoder, OnnxSession, graph_drafter
from d2sd.runtime.engine import Engine
from d2sd.runtime.model_runner import ModelRunner
from d2sd.runtime.request import Limits, Request
from d2sd.runtime.sampling_params import SamplingParams
from d2sd.runtime.speculation.policy import make_policy
from tests.modeling.test_fp8 import fp8_decoder
from tests.runtime.helpers import BLOCK, BRANCHES, BUDGET
from tests.tiny import in_fp8, random_tokens, runner_of, tiny_decoder, tiny_drafter, tiny_flex

pytest.importorskip("onnxruntime", reason="the extra engines is not installed")
pytestmark = [pytest.mark.export, pytest.mark.slow, pytest.mark.timeout(300)]
PAGE = 4


def executor_of(folder: Path, target: Decoder, *drafters: DraftModel) -> ModelRunner:
    """By graphs of all models, the drafters in the order of their roles."""
    aux_layer_ids, dtype = drafters[0].config.target_layer_ids, target.embed_tokens.weight.dtype
    export_target(target, aux_layer_ids, PAGE, folder / "target.onnx")
    graphs = []
    for role, drafter in zip(DrafterRole, drafters, strict=False):
        file = folder / f"{role.folder}.onnx"
        export_drafter(KINDS[drafter.config.kind].graph_body(drafter), drafter.config, dtype, PAGE, file)
        graphs.append(graph_drafter(drafter, OnnxSession(file), PAGE))
    return runner_of(GraphDecoder(target, aux_layer_ids, OnnxSession(folder / "target.onnx")), *graphs)


def engine_of(runner: ModelRunner, name: PolicyName) -> Engine:
    policy = make_policy(name, block_size=BLOCK, branches=BRANCHES, row_budget=BUDGET)
    return Engine(runner, policy, Limits(max_batch=4, max_context=64, page_size=PAGE, prefill_chunk=8))


@pytest.mark.full
@torch.inference_mode()
def test_an_fp8_graph_multiplies_the_numbers_of_the_emulation(tmp_path: Path) -> None:
    """Token for token, at a precision where nothing but FP8 rounds; the chain, the tree and the pages included."""
    target = fp8_decoder(cache=True)
    first = tiny_drafter(target.config, block_size=BLOCK, layers=1)
    second = tiny_drafter(target.config, block_size=BLOCK, layers=1, role="variable_prefix", seed=2)
    first, second = (in_fp8(drafter) for drafter in (first, second))
    head = in_fp8(tiny_flex(target, block_size=BLOCK, anchored=True), FLEXDRAFT.fp8_layers(tiny_flex(target).config))
    head.join(target)
    pair, of_head = executor_of(tmp_path, target, first, second), executor_of(tmp_path, target, head)
    prompts = random_tokens(target, 6, 5, seed=3).tolist()
    requests = [Request(tuple(prompt), 12, SamplingParams()) for prompt in prompts]
    alone, drafting = runner_of(*deepcopy((target, first, second))), runner_of(*deepcopy((target, head)))
    expected = [s.answer for s in engine_of(alone, "off").generate(requests)]
    pairs: tuple[tuple[PolicyName, ModelRunner, ModelRunner], ...] = (
        ("hybrid", pair, alone),
        ("chain", of_head, drafting),
    )
    for policy, *runners in pairs:
        found, emulated = (engine_of(one, policy).generate(requests) for one in runners)
        assert [s.answer for s in found] == expected
        assert [s.stats.tau for s in found] == [s.stats.tau for s in emulated], "drafts are the emulation's"


@pytest.mark.full
@torch.inference_mode()
def test_graphs_with_windows_write_what_models_write(tmp_path: Path) -> None:
    """The target has sinks, one layer of each drafter is causal, and contexts outgrow all windows. The second drafter
    drafts from the anchor's row on, and embeds masks itself.
    """
    target = tiny_decoder("qwen3", head_dim=16, windows=(5, None, 9), sinks=True)
    attention = {"windows": (6, 3), "causal": (False, True)}
    first = tiny_drafter(target.config, block_size=BLOCK, attention=attention)
    second = tiny_drafter(
        target.config,
        block_size=BLOCK - 1,
        role="variable_prefix",
        seed=2,
        attention=attention,
        sample_from_anchor=True,
        mask_embedding=True,
    )
    runner = executor_of(tmp_path, target, first, second)
    requests = [Request(tuple(p), 16, SamplingParams()) for p in random_tokens(target, 5, 14, seed=3).tolist()]
    alone = runner_of(*deepcopy((target, first, second)))
    expected = [s.answer for s in engine_of(alone, "off").generate(requests)]
    for policy in ("off", "hybrid"):
        found, models = (engine_of(one, policy).generate(requests) for one in (runner, alone))
        assert [s.answer for s in found] == [s.answer for s in models] == expected
        assert [s.stats.tau for s in found] == [s.stats.tau for s in models]
