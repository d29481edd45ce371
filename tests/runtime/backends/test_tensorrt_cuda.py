"""Real engines on a real GPU against the models they were made of. **Not yet run**: it needs what the marks name."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from d2sd.convert.engines.build import Job, build_engines
from d2sd.convert.engines.profiles import make_profiles
from d2sd.convert.kinds import DFLASH
from d2sd.convert.onnx.export import export_drafter, export_target
from d2sd.modeling.decoder import Decoder
from d2sd.modeling.drafters.dflash import Drafter
from d2sd.modeling.kv_pool import KVPool, PoolSizes, Rows
from d2sd.modeling.where import Where
from d2sd.plugins.cascade_attention.onnx import VERSION
from d2sd.policies import DrafterRole
from d2sd.runtime.backends.exported import GraphDrafter
from d2sd.runtime.backends.tensorrt import engine_runner
from d2sd.runtime.backends.tensorrt_checks import EngineFile
from d2sd.runtime.engine import Engine
from d2sd.runtime.model_runner import ModelRunner
from d2sd.runtime.request import Limits
from d2sd.runtime.speculation.policy import make_policy
from d2sd.tensorrt_env import PORTABLE, find_tensorrt
from tests.runtime.fake_engines import PAGE, RECIPE
from tests.runtime.helpers import BLOCK, BRANCHES, BUDGET, some_requests
from tests.tiny import ancestor_mask, pool_for, random_tokens, random_tree, tiny_decoder, tiny_drafter

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="engines run on an NVIDIA GPU, and there is none")
#: Of fp16 numbers, as a share of the largest: some twenty units in its last place, for sums in another order.
WITHIN = 2e-2


@dataclass(frozen=True)
class Served:
    """Models on the CPU, and an executor over their engines."""

    target: Decoder
    drafters: dict[DrafterRole, Drafter]
    engines: ModelRunner


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    """Heads of 16, the least that the kernels take, in fp16."""
    for module in ("tensorrt_rtx", "triton", "onnxscript"):
        pytest.importorskip(module, reason="the extras engines and triton are not installed")
    folder = tmp_path_factory.mktemp("engines")
    target = tiny_decoder("qwen3", layers=2, head_dim=16).half()
    first = tiny_drafter(target.config, block_size=BLOCK, layers=1).half()
    second = tiny_drafter(target.config, block_size=BLOCK, layers=1, role="variable_prefix", seed=2).half()
    models: dict[str, Decoder | Drafter] = {"target": target, "first": first, "second": second}
    export_target(target, first.config.target_layer_ids, PAGE, folder / "target.onnx")
    for name, drafter in (("first", first), ("second", second)):
        export_drafter(DFLASH.graph_body(drafter), drafter.config, torch.float16, PAGE, folder / f"{name}.onnx")
    profiles = {name: make_profiles(RECIPE, "tensorrt-rtx", model.config) for name, model in models.items()}
    jobs = [
        Job(
            graph=str(folder / f"{name}.onnx"),
            engine=str(folder / f"{name}.engine"),
            report=str(folder / f"{name}.json"),
            builder="tensorrt-rtx",
            compute=PORTABLE,
            profiles=profiles[name],
        )
        for name in models
    ]
    reports = build_engines(jobs, folder / "scratch", at_once=len(jobs))
    built = {
        name: EngineFile(Path(job.engine), job.builder, report.version, VERSION, job.compute, profiles[name])
        for name, job, report in zip(models, jobs, reports, strict=True)
    }
    drafters = {DrafterRole.FIRST: first, DrafterRole.SECOND: second}
    engines = engine_runner(
        find_tensorrt("tensorrt-rtx"),
        (deepcopy(target), built["target"]),
        {role: (deepcopy(drafter), built[role.key]) for role, drafter in drafters.items()},
        aux_layer_ids=first.config.target_layer_ids,
        page_size=PAGE,
    )
    return Served(target, drafters, engines)


def close(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    most = WITHIN * max(1.0, expected.abs().max().item())
    assert (found.cpu().float() - expected.float()).abs().max() <= most


def context(model: Decoder | Drafter, lengths: list[int]) -> tuple[KVPool, KVPool, Tensor]:
    """Noise in all pages of two requests, on the CPU and on the GPU, and the page table."""
    body = model.config.body
    pool, table = pool_for(body, len(lengths), 24, page_size=PAGE, dtype=torch.float16)
    there = KVPool(body, PoolSizes(len(pool.k[0]), PAGE), torch.float16, "cuda")
    for kind, (pages, copy) in enumerate(((pool.k, there.k), (pool.v, there.v))):
        pages.copy_(torch.randn(pages.shape, generator=torch.Generator().manual_seed(kind)))
        copy.copy_(pages)
    return pool, there, table


def moved(rows: Rows) -> Rows:
    positions, mask, table, context = (
        t.cuda() for t in (rows.positions, rows.attn_mask, rows.where.pages, rows.where.context_len)
    )
    return Rows(positions, mask, Where(table, context))


@torch.inference_mode()
def test_the_targets_engine_verifies_trees(served: Served) -> None:
    aux_layer_ids, lengths = served.drafters[DrafterRole.FIRST].config.target_layer_ids, torch.tensor([0, 9])
    pool, there, table = context(served.target, lengths.tolist())
    tokens = random_tokens(served.target, 2, BUDGET)
    attn_mask = torch.stack([ancestor_mask(random_tree(BUDGET, seed)) for seed in range(2)])
    rows = Rows(lengths[:, None] + attn_mask.sum(-1) - 1, attn_mask, Where(table, lengths))
    found = served.engines.target(tokens.cuda(), moved(rows), there, aux_layer_ids)
    expected = served.target(tokens, rows, pool, aux_layer_ids)
    for name in ("hidden", "features", "k", "v"):
        close(getattr(found, name), getattr(expected, name))


@torch.inference_mode()
@pytest.mark.parametrize("role", [DrafterRole.FIRST, DrafterRole.SECOND])
def test_a_drafters_engine_fills_blocks_and_gives_keys_and_values(served: Served, role: DrafterRole) -> None:
    drafter, graph = served.drafters[role], served.engines.drafters[role]
    assert isinstance(graph, GraphDrafter)
    lengths = torch.tensor([5, 12])
    pool, there, table = context(drafter, lengths.tolist())
    before = there.k.clone(), there.v.clone()
    embedded = served.target.embed_tokens(random_tokens(served.target, 2, 2 * BLOCK))
    of_block = torch.arange(2).repeat_interleave(BLOCK)
    attn_mask = (of_block[:, None] == of_block).expand(2, -1, -1)
    rows = Rows(lengths[:, None] + torch.arange(BLOCK).repeat(2), attn_mask, Where(table, lengths))
    close(graph.draft(embedded.cuda(), moved(rows), there), drafter.draft(embedded, rows, pool))
    features = torch.randn(1, 7, drafter.fc.in_features, generator=torch.Generator().manual_seed(0)).half()
    places = torch.arange(7)[None]
    found = graph.context_keys_values(features.cuda(), places.cuda())
    for one, other in zip(found, drafter.context_keys_values(features, places), strict=True):
        close(one, other)
    assert torch.equal(there.k[:, 1:], before[0][:, 1:])
    assert torch.equal(there.v[:, 1:], before[1][:, 1:])


def test_the_loop_runs_on_a_stream_of_its_own(served: Served) -> None:
    """Equality with plain decoding is tested on real models: tiny ones in fp16 have ties."""
    policy = make_policy("hybrid", block_size=BLOCK, branches=BRANCHES, row_budget=BUDGET)
    limits = RECIPE.limits
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        engine = Engine(
            served.engines, policy, Limits(limits.max_batch, limits.max_context, PAGE, limits.prefill_chunk)
        )
        sequences = engine.generate(some_requests())
    assert [len(s.answer) for s in sequences] == [r.max_new_tokens for r in some_requests()]
    assert any(s.stats.tau > 1 for s in sequences)
