"""The draft model that TensorRT-LLM builds and calls: d2sd's own drafters over pages that a slot owns.

    slot s     pages 1 + s·M .. s·M + M of each drafter's pool, for ever; page 0 takes rows that are not kept
    step       context of newly committed tokens -> pages; then `draft_trees`, the first part of d2sd's decode step

A slot belongs to one request at a time, and a position is written before it is read, so a slot that is used again needs
no reset: a request's context is what its length says. TensorRT-LLM's own K/V for a draft model is not used.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from d2sd.bundle.load import CALIBRATION
from d2sd.bundle.serving import scores_of
from d2sd.calibration import load_calibration
from d2sd.convert.checkpoint.families import parse_target_config
from d2sd.convert.checkpoint.hf_config import HFConfig
from d2sd.convert.kinds import load_drafter
from d2sd.errors import D2SDError
from d2sd.manifest import Manifest
from d2sd.modeling.config import DecoderConfig
from d2sd.modeling.decoder import TargetModel, embedding_of
from d2sd.modeling.drafters.dflash import DFlashModel
from d2sd.modeling.drafters.interface import DraftModel
from d2sd.modeling.kv_pool import ContextRows, PoolSizes
from d2sd.modeling.prepare import prepare_for_inference
from d2sd.modeling.where import Where
from d2sd.plugins.trees import Tree
from d2sd.policies import DrafterRole
from d2sd.runtime.batch import Batch
from d2sd.runtime.decode import draft_trees
from d2sd.runtime.memory import free_memory
from d2sd.runtime.model_runner import ModelRunner
from d2sd.runtime.speculation.policy import Policy

# Shape letters: B requests, R slots and the dummy slot, M pages a slot, N rows of the target of any requests, n
# auxiliary layers, E hidden.

#: Largest share of the free memory that the drafters' pages may take.
MOST_SHARE = 0.5


class SharedTables(TargetModel):
    """The embedding and the head of a target whose layers another engine runs."""

    def __init__(self, config: DecoderConfig, embedding: Tensor, head: Tensor) -> None:
        super().__init__()
        # no layers: its pool has no bytes
        body = replace(config.body, num_layers=0, windows=())
        self.config = replace(config, body=body, tie_word_embeddings=False)
        with torch.device("meta"):
            self.embed_tokens = embedding_of(config)
            self.lm_head = nn.Linear(head.shape[1], head.shape[0], bias=False)
        for module, table in ((self.embed_tokens, embedding), (self.lm_head, head)):
            module.weight = nn.Parameter(table.detach()[: config.vocab_size], requires_grad=False)
        self.packed_head = None


class TreeDrafters(nn.Module):
    """The drafters of the bundle at `bundle` that `policy` runs, built without parameters and loaded later.

    TensorRT-LLM reads `model_config` and `config`; its walks over submodules find none.
    """

    def __init__(self, bundle: Path, manifest: Manifest, policy: Policy, draft_config: Any) -> None:
        super().__init__()
        self.model_config, self.config = draft_config, draft_config.pretrained_config
        self.policy = policy
        self._bundle, self._manifest = bundle, manifest
        self._batches: dict[int, Batch] = {}  # by size: what does not change from step to step

    def load_weights(self, weights: Any, weight_mapper: Any = None) -> None:
        """Nothing: the drafters read their own files, both of them, once the target's tables are there."""

    def load_weights_from_target_model(self, target_model: Any) -> None:
        """Load the drafters in the type and on the device of the target's embedding."""
        embedding, head = target_model.model.embed_tokens.weight, target_model.lm_head.weight
        if embedding.dtype not in (torch.bfloat16, torch.float16, torch.float32) or head.dtype != embedding.dtype:
            raise D2SDError(
                "The drafters share the target's embedding and head, which must be plain numbers of one type.",
                where=self._bundle / "target",
                found=f"{embedding.dtype} and {head.dtype}",
                expected="bf16 or fp16",
            )
        config = parse_target_config(HFConfig.read(self._bundle / "target"))
        tables = SharedTables(config, embedding, head)
        drafters: dict[DrafterRole, DraftModel] = {}
        for role in self.policy.drafters:
            drafter = load_drafter(self._bundle / role.folder, embedding.dtype).to(embedding.device)
            if isinstance(drafter, DFlashModel):
                drafter.join(tables)
            drafters[role] = drafter
        self.runner = ModelRunner(
            *prepare_for_inference(tables, drafters, keep=False), block_size=self._manifest.recipe.tree.depth
        )
        named = self._manifest.recipe.drafters
        file = load_calibration(self._bundle / CALIBRATION).among(named.sources) if named.calibration else None
        self.calibration = None if file is None else scores_of(file).to(self.runner.device)

    @property
    def allocated(self) -> bool:
        """Whether `allocate` has run."""
        return hasattr(self, "_table")

    def allocate(self, slots: int, tokens: int) -> None:
        """Pages for `slots` requests, the dummy among them, of up to `tokens` tokens each.

        Raises D2SDError if they take more than `MOST_SHARE` of the free memory.
        """
        page = self._manifest.recipe.limits.page_size
        each = -(-tokens // page)
        size, free = (1 + slots * each) * self.runner.layout.bytes_of(page).page, free_memory(self.runner.device)
        text = f"{size / 1e9:.2f} GB for {slots} slots of {tokens:,} tokens, of {free / 1e9:.2f} GB that are free"
        if size > MOST_SHARE * free:
            raise D2SDError(
                "The drafters' context does not fit.",
                where=f"{self._bundle}: max_batch_size and max_seq_len",
                found=text,
                expected=f"at most {MOST_SHARE:.0%} of the free memory",
                fix="lower max_batch_size, max_seq_len or kv_cache_config.free_gpu_memory_fraction",
            )
        print(f"d2sd: the drafters' context takes {text}", file=sys.stderr, flush=True)
        self.runner.allocate(PoolSizes(1 + slots * each, page))
        if self.policy.copies:
            self.runner.keep_text()
        self._table = 1 + torch.arange(slots * each, device=self.runner.device).view(slots, each)

    @torch.inference_mode()
    def write_context(self, features: Tensor, tokens: Tensor, slots: Tensor, positions: Tensor, keep: Tensor) -> None:
        """Commit rows of the target: features [N, n·E] of tokens [N] at positions [N] of slots [N], where `keep`."""
        page, last = self.runner.target_pool.page_size, self._table.shape[1] - 1
        places = positions // page
        pages = torch.where(keep & (places <= last), self._table[slots, places.clamp(max=last)], 0)
        self.runner.context.add(ContextRows(features, positions, (pages,)))
        self.runner.context.inject(self.policy.drafters)
        if self.runner.text_pages is not None:
            self.runner.text_pages[pages, positions % page] = tokens

    @torch.inference_mode()
    def draft(self, anchor: Tensor, slots: Tensor, context_len: Tensor) -> Tree:
        """A tree for each request: anchor [B] behind context_len [B] committed tokens of slots [B]."""
        count = len(anchor)
        if count not in self._batches:  # made before a graph of this size is captured: TensorRT-LLM warms each up
            batch = Batch.dummy(self.runner.scratch(count, 1), self.runner.vocab_size, self.runner.device)
            self._batches[count] = batch.to(self.runner.device)
        length = context_len.clamp(max=self._table.numel() // len(self._table) * self.runner.target_pool.page_size)
        batch = replace(self._batches[count], anchor=anchor, where=Where(self._table[slots], length))
        return draft_trees(self.runner, self.policy, batch, self.calibration).tree
