"""The part of a TensorRT-LLM step that d2sd drafts, on fake CUDA tensors: run by test_step.py."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from d2sd.integrations.trtllm import tree_drafters
from d2sd.integrations.trtllm.tree_drafters import TreeDrafters
from d2sd.integrations.trtllm.tree_worker import tree_worker
from d2sd.policies import PolicyName
from tests.cuda.models import BLOCK, NODES, policy_of, runner
from tools.cuda import guard
from tools.cuda.fake import Watch, fake_gpu

SLOTS, REQUESTS, LENGTH = 8, 3, 256
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def guarded() -> None:
    guard.load(Path(os.environ["D2SD_CUDA_GUARD"]))


def storage() -> Any:
    """The slots' tensors, as `check_step` asks for them."""
    words = -(-NODES // 32)
    slots = SimpleNamespace(
        packed_mask=torch.zeros(SLOTS, NODES, words, dtype=torch.int32, device="cuda"),
        position_offsets=torch.zeros(SLOTS, NODES, dtype=torch.int32, device="cuda"),
        retrieve_index=torch.zeros(SLOTS, NODES, dtype=torch.int32, device="cuda"),
        retrieve_next_token=torch.zeros(SLOTS, NODES, dtype=torch.int32, device="cuda"),
        retrieve_next_sibling=torch.zeros(SLOTS, NODES, dtype=torch.int32, device="cuda"),
        has_tree=torch.zeros(SLOTS, dtype=torch.bool, device="cuda"),
        all_ids_buf=torch.zeros(SLOTS - 1, dtype=torch.long, device="cuda"),
    )
    slots.mark_valid = lambda ids, count: slots.has_tree.index_fill_(0, ids[:count], True)
    return slots


class Base:
    """The buffers of TensorRT-LLM's worker that are read."""

    def __init__(self) -> None:
        self.tokens_per_gen_step, self._max_path_len, self._max_batch_size = NODES, BLOCK, SLOTS - 1
        self.spec_tree_manager = SimpleNamespace(slot_storage=storage())
        path = (SLOTS - 1, BLOCK)
        self._accepted_tokens_buf = torch.zeros(path, dtype=torch.int32, device="cuda")
        self._num_accepted_tokens_buf = torch.ones(path[0], dtype=torch.int32, device="cuda")
        self._accepted_draft_indices_tensor = torch.zeros(path[0], BLOCK - 1, dtype=torch.int32, device="cuda")


def drafting(name: PolicyName, patch: pytest.MonkeyPatch, *, lookup: bool = False) -> Watch:
    """Launches and copies of the second step of generations alone; the first step makes what is made once."""
    watch = Watch()
    patch.setattr(tree_drafters, "free_memory", lambda device: 10**12)
    with fake_gpu(watch):
        policy = policy_of(name, lookup=lookup)
        manifest: Any = SimpleNamespace(recipe=SimpleNamespace(limits=SimpleNamespace(page_size=16)))
        drafters = TreeDrafters(Path(), manifest, policy, SimpleNamespace(pretrained_config=None))
        drafters.runner, drafters.calibration = runner(2, 2, fp8=False, roles=policy.drafters), None
        worker = tree_worker(Base)()
        cache = SimpleNamespace(
            enable_block_reuse=False,
            num_kv_heads_per_layer=[2, 2],
            max_attention_window_vec=[LENGTH],
            max_seq_len=LENGTH,
        )
        rows = REQUESTS * NODES
        attn = SimpleNamespace(
            num_contexts=0,
            num_seqs=REQUESTS,
            num_ctx_tokens=0,
            _seq_lens_cuda=torch.zeros(REQUESTS, dtype=torch.int32, device="cuda"),
            kv_cache_manager=cache,
        )
        spec = SimpleNamespace(
            hidden_states=torch.zeros(4 * rows, 128, dtype=torch.bfloat16, device="cuda"),
            hidden_size=64,
            layers_to_capture=[0, 1],
            gather_ids=torch.zeros(rows, dtype=torch.long, device="cuda"),
        )
        ids = torch.zeros(rows, dtype=torch.int32, device="cuda")
        for _ in range(2):
            with watch:
                watch.launches.clear()
                watch.copies.clear()
                with watch.stage("context"):
                    inputs = worker.prepare_1st_drafter_inputs(ids, ids, None, None, attn, spec, drafters)
                counts = worker._num_accepted_tokens_buf[:REQUESTS]
                with watch.stage("draft"):
                    tokens = worker._forward_draft_loop(
                        inputs, attn, spec, drafters, None, 0, REQUESTS, REQUESTS, counts, None, None
                    )
                assert tokens.shape == (REQUESTS, NODES - 1)
        assert not worker.drafting_failed
    return watch


@pytest.mark.parametrize(
    ("name", "lookup", "context", "draft"),
    [("chain", False, 41, 95), ("ddtree", True, 43, 92), ("d2sd", False, 49, 120), ("hybrid", True, 51, 122)],
)
def test_generations_read_nothing_back(
    name: PolicyName, lookup: bool, context: int, draft: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FakeTensorMode refuses shapes that depend on data and values on the host; copies are watched."""
    watch = drafting(name, monkeypatch, lookup=lookup)
    assert watch.copies == []
    assert (watch.launches["context"], watch.launches["draft"]) == (context, draft)
