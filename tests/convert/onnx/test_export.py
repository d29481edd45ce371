"""Exported graphs in ONNX Runtime, through the functions they carry, against the models they were made of."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from d2sd.convert.kinds import DFLASH
from d2sd.convert.onnx.export import export_drafter, export_target
from d2sd.modeling.config import Role
from d2sd.modeling.decoder import Decoder
from d2sd.modeling.drafters.dflash import Drafter
from d2sd.modeling.kv_pool import KVPool, Rows
from d2sd.modeling.where import Where
from d2sd.runtime.backends.exported import GraphDecoder, GraphDrafter, OnnxSession
from d2sd.runtime.model_runner import ModelRunner
from d2sd.runtime.request import Request
from d2sd.runtime.sampling_params import SamplingParams
from tests.convert.exported import PAGE, PAIRS, TAPS, ExportOnce, tiny_pair
from tests.convert.helpers import tree_bytes
from tests.runtime.helpers import make_engine
from tests.tiny import HEADS, ancestor_mask, pool_for, prepared, random_tokens, random_tree, tiny_drafter

pytest.importorskip("onnxruntime", reason="the extra engines is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.export]
#: Of fp32 numbers of order 1, summed in another order; of fp16, a few units in the last place.
WITHIN = {torch.float32: 1e-4, torch.float16: 2e-2}


@dataclass(frozen=True)
class Pair:
    """A target and a drafter, and the same as graphs."""

    target: Decoder
    drafter: Drafter
    graph: GraphDecoder
    draft_graph: GraphDrafter


@pytest.fixture(
    scope="module",
    params=[
        *(pytest.param((*pair, False), id=pair[0]) for pair in PAIRS),
        pytest.param(("qwen3", torch.float32, True), id="windows", marks=pytest.mark.slow),
        pytest.param(("gemma3_text", torch.float32, False), id="gemma3", marks=[pytest.mark.slow, pytest.mark.full]),
    ],
)
def pair(request: pytest.FixtureRequest, export_once: ExportOnce) -> Pair:
    family, dtype, windows = request.param
    exported = export_once(family, dtype, windows=windows)
    target, drafter, folder = exported.target, exported.drafter, exported.folder
    graph = GraphDecoder(target, TAPS, OnnxSession(folder / "target.onnx"))
    return Pair(target, drafter, graph, GraphDrafter(drafter, OnnxSession(folder / "drafter.onnx"), PAGE))


def context(body_of: Decoder | Drafter, lengths: list[int], dtype: torch.dtype) -> tuple[KVPool, Tensor, Tensor]:
    """Pages with `lengths` committed tokens of noise, NaN elsewhere."""
    pool, table = pool_for(body_of.config.body, len(lengths), 24, page_size=PAGE, dtype=dtype)
    for kind, pages in enumerate((pool.k, pool.v)):
        draw = torch.Generator().manual_seed(kind)
        for request, length in enumerate(lengths):
            for place in range(length):
                page = table[request, place // PAGE]
                noise = torch.randn(pages.shape[0], *pages.shape[3:], generator=draw)
                pages[:, page, place % PAGE] = noise.to(dtype)
    return pool, table, torch.tensor(lengths)


def close(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    most = WITHIN[expected.dtype] * max(1.0, expected.abs().max().item())
    assert (found.float() - expected.float()).abs().max() <= most


@pytest.mark.sampled(4)
@pytest.mark.parametrize("rows", [1, 7, 40])
def test_a_target_verifies_trees(pair: Pair, rows: int) -> None:
    """Contexts empty, partial and full; 40 rows take two words of visibility."""
    dtype = pair.target.embed_tokens.weight.dtype
    pool, table, lengths = context(pair.target, [0, 9, 24], dtype)
    tokens = random_tokens(pair.target, 3, rows)
    attn_mask = torch.stack([ancestor_mask(random_tree(rows, seed)) for seed in range(3)])
    depth = attn_mask.sum(-1) - 1
    asked = tokens, Rows(lengths[:, None] + depth, attn_mask, Where(table, lengths)), pool, TAPS
    found, expected = pair.graph(*asked), pair.target(*asked)
    for name in ("hidden", "features", "k", "v"):
        close(getattr(found, name), getattr(expected, name))
    close(pair.graph.logits(found.hidden).to(dtype), pair.target.logits(expected.hidden).to(dtype))


@pytest.mark.parametrize("blocks", [1, 3])
def test_a_drafter_fills_blocks(pair: Pair, blocks: int) -> None:
    dtype = pair.target.embed_tokens.weight.dtype
    pool, table, lengths = context(pair.drafter, [5, 0, 24], dtype)
    of_block = torch.arange(blocks).repeat_interleave(4)
    attn_mask = (of_block[:, None] == of_block).expand(3, -1, -1)
    positions = lengths[:, None] + torch.arange(4).repeat(blocks)
    embedded = pair.target.embed_tokens(random_tokens(pair.target, 3, 4 * blocks))
    asked = embedded, Rows(positions, attn_mask, Where(table, lengths)), pool
    close(pair.draft_graph.draft(*asked), pair.drafter.draft(*asked))


def test_a_drafter_gives_the_contexts_keys_and_values(pair: Pair) -> None:
    dtype = pair.target.embed_tokens.weight.dtype
    width = pair.drafter.fc.in_features
    features = torch.randn(2, 5, width, generator=torch.Generator().manual_seed(0)).to(dtype)
    positions = torch.arange(5).expand(2, 5) + torch.tensor([[0], [11]])
    found = pair.draft_graph.context_keys_values(features, positions)
    for one, other in zip(found, pair.drafter.context_keys_values(features, positions), strict=True):
        close(one, other)


def test_context_that_is_not_in_the_pages_is_read_too(pair: Pair) -> None:
    """One call with new features says what committing them first would have said."""
    dtype = pair.target.embed_tokens.weight.dtype
    pool, table, lengths = context(pair.drafter, [5, 0], dtype)
    new = torch.tensor([3, 2])
    features = torch.randn(2, 3, pair.drafter.fc.in_features, generator=torch.Generator().manual_seed(0)).to(dtype)
    places = lengths[:, None] + torch.arange(3)
    embedded = pair.target.embed_tokens(random_tokens(pair.target, 2, 4))
    attn_mask = torch.ones(2, 4, 4, dtype=torch.bool)
    after = lengths + new
    rows = Rows(after[:, None] + torch.arange(4), attn_mask, Where(table, lengths))
    found = pair.draft_graph.draft_with_new_context(embedded, rows, pool, features, places, new)
    k, v = pair.drafter.context_keys_values(features, places)
    pool.write(k, v, (table,), places, torch.arange(3) < new[:, None])
    close(found, pair.drafter.draft(embedded, Rows(rows.positions, attn_mask, Where(table, after)), pool))


def test_equal_models_give_equal_files(
    export_once: ExportOnce, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one = tree_bytes(export_once(*PAIRS[0]).folder)
    monkeypatch.setattr(logging.getLogger("torch"), "handlers", [caplog.handler])
    export_target(tiny_pair(*PAIRS[0])[0], TAPS, PAGE, tmp_path / "other" / "target.onnx")
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert not said, "nobody who builds a bundle wants to know what the exporter thinks"
    other = tree_bytes(tmp_path / "other")
    assert other.keys() == {"target.onnx", "target.onnx.data"}
    assert other == {name: one[name] for name in other}
    text = b"".join(one.values())
    assert b"/site-packages/" not in text
    assert str(tmp_path).encode() not in text
    assert b"d2sd/convert" not in text


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name, head in HEADS.items() if head.graph_refusal is None])
def test_a_graph_with_a_head_writes_the_text_of_plain_decoding(tmp_path: Path, name: str) -> None:
    """Convolutions are part of the graph, and begin again at every branch; the head is run outside of it."""
    target, _ = tiny_pair("qwen3", torch.float32)
    roles: tuple[Role, ...] = ("first", "variable_prefix")
    plain = [tiny_drafter(target.config, target_layer_ids=TAPS, role=role, head=HEADS[name]) for role in roles]
    graphs = []
    for drafter in plain:
        drafter.join(target)
        file = tmp_path / drafter.config.role / "drafter.onnx"
        export_drafter(DFLASH.graph_body(drafter), drafter.config, torch.float32, PAGE, file)
        graphs.append(GraphDrafter(drafter, OnnxSession(file), PAGE))
        pool, table, lengths = context(drafter, [5, 0, 24], torch.float32)
        of_block = torch.arange(3).repeat_interleave(4)
        attn_mask = (of_block[:, None] == of_block).expand(3, -1, -1)
        rows = Rows(lengths[:, None] + torch.arange(4).repeat(3), attn_mask, Where(table, lengths))
        embedded = target.embed_tokens(random_tokens(target, 3, 12))
        close(graphs[-1].draft(embedded, rows, pool), drafter.draft(embedded, rows, pool))
    requests = [Request((5, 9, 1, 33), 20, SamplingParams(seed=1)), Request((60, 3), 20, SamplingParams(1.0, seed=2))]
    answers, proposed = [], []
    for drafters in (graphs, plain):
        engine = make_engine(ModelRunner(*prepared(target, *drafters)), "hybrid")
        answers.append([sequence.answer for sequence in engine.generate(requests)])
        proposed.append(engine.stats.steps)
    off = make_engine(ModelRunner(target, {}), "off", row_budget=1)
    assert answers[0] == answers[1] == [sequence.answer for sequence in off.generate(requests)]
    assert proposed[0] == proposed[1]
