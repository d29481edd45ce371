"""Requests in flight around one worker: contexts in chunks, generations, slots that are used again, padding, paged K/V.

The target is a `Decoder` whose rows, positions and mask are what metadata says, and whose K/V of all rows is written
behind a request's context, as TensorRT-LLM's attention does; acceptance compacts it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from d2sd.modeling.decoder import Decoder
from d2sd.modeling.kv_pool import KVPool, PoolSizes, Rows
from d2sd.modeling.where import Where
from tests.d2sd.integrations.trtllm.standin import ops
from tests.d2sd.integrations.trtllm.standin.modules import Resources

# Shape letters: C contexts before G generations, T rows of all, N nodes, E hidden, L layers.


@dataclass(eq=False)
class Request:
    prompt: list[int]
    new_tokens: int
    arrives: int = 0  # at this step
    tokens: list[int] = field(default_factory=list)  # prompt and answer
    counts: list[int] = field(default_factory=list)  # accepted tokens of every generation step, the bonus included
    cached: int = 0
    drafts: Tensor | None = None
    blocks: list[int] = field(default_factory=list)
    py_seq_slot: int | None = None
    is_cuda_graph_dummy: bool = False

    @property
    def answer(self) -> list[int]:
        return self.tokens[len(self.prompt) :][: self.new_tokens]

    @property
    def in_context(self) -> bool:
        return self.cached < len(self.prompt)


@dataclass(frozen=True)
class Settings:
    """Settings with which a server was started."""

    slots: int = 4
    chunk: int = 5  # prompt tokens of a context a step
    sm: int = 90
    padding: int = 0  # dummy requests of batches that are generations alone
    tokens_per_block: int = 4
    temperature: float = 0.0
    rejection: bool = False


class Server:
    """`modules` are the package's, or the stand-in's; `arguments` the bundle's `speculative_config`."""

    def __init__(
        self, modules: dict[str, Any], decoder: Decoder, arguments: dict[str, Any], max_seq_len: int, settings: Settings
    ) -> None:
        self.decoder, self.settings, self.max_seq_len = decoder, settings, max_seq_len
        self.requests: list[Request] = []
        self.steps, self.free = 0, list(range(settings.slots))[::-1]
        self.nodes = arguments["max_total_draft_tokens"] + 1
        self.spec = SimpleNamespace(
            **{"sa_config": None} | arguments, tokens_per_gen_step=self.nodes, _max_batch_size=settings.slots
        )
        body = decoder.config.body
        pretrained = SimpleNamespace(
            hidden_size=body.hidden_size, num_hidden_layers=body.num_layers, vocab_size=decoder.config.vocab_size
        )
        model_config = SimpleNamespace(
            spec_config=self.spec, pretrained_config=pretrained, mapping=SimpleNamespace(world_size=1)
        )
        draft_config = SimpleNamespace(pretrained_config=SimpleNamespace(num_hidden_layers=5))
        self.engine = modules["modeling_speculative"].SpecDecOneEngineForCausalLM(
            SimpleNamespace(embed_tokens=decoder.embed_tokens),
            SimpleNamespace(weight=decoder.head),
            model_config,
            draft_config,
        )
        self.engine.load_draft_weights(weights={})
        self.drafters, self.worker = self.engine.draft_model, self.engine.spec_worker
        self._make_cache()
        manager = modules["spec_tree_manager"].SpecTreeManager(
            max_num_requests=settings.slots,
            max_total_draft_tokens=self.nodes - 1,
            max_draft_len=self.spec.max_draft_len,
            dynamic_tree_max_topK=self.spec.dynamic_tree_max_topK,
        )
        self.storage = manager.slot_storage
        self.resources = Resources(manager, self.cache)
        self.metadata = modules["trtllm"].TrtllmAttentionMetadata(
            settings.slots, self.nodes, self.cache, sm=settings.sm
        )
        self.spec_metadata = modules["eagle3"].Eagle3OneModelSpecMetadata(
            max_draft_len=self.spec.max_draft_len,
            max_total_draft_tokens=self.nodes - 1,
            max_num_requests=settings.slots,
            hidden_size=body.hidden_size,
            max_num_tokens=settings.slots * max(self.nodes, settings.chunk),
            layers_to_capture=set(self.spec.eagle3_layers_to_capture),
            use_rejection_sampling=settings.rejection,
            dtype=decoder.embed_tokens.weight.dtype,
        )
        self.spec_metadata.is_all_greedy_sample = settings.temperature == 0

    def _make_cache(self) -> None:
        body, page = self.decoder.config.body, self.settings.tokens_per_block
        each = -(-(self.max_seq_len + self.nodes) // page)
        blocks = self.settings.slots * each
        self.pool = KVPool(body, PoolSizes(blocks, page), self.decoder.embed_tokens.weight.dtype, "cpu")
        order = torch.randperm(blocks, generator=torch.Generator().manual_seed(7)).tolist()
        self._blocks = [order[slot * each : (slot + 1) * each] for slot in range(self.settings.slots)]
        number = 1 + len(ops.POOLS)
        ops.POOLS[number] = self.pool
        self.cache = SimpleNamespace(
            num_layers=body.num_layers,
            num_kv_heads_per_layer=[body.num_kv_heads] * body.num_layers,
            head_dim=body.head_dim,
            element_size=self.pool.k.element_size(),
            dtype=self.pool.k.dtype,
            max_total_draft_tokens=self.nodes - 1,
            max_attention_window_vec=[self.max_seq_len],
            max_seq_len=self.max_seq_len,
            max_blocks_per_seq=each,
            tokens_per_block=page,
            kv_cache_pool_pointers=torch.tensor([[number, 0]]),
            enable_block_reuse=False,
        )

    # -- requests ------------------------------------------------------------------------------------------------------

    def run(self, requests: list[Request]) -> None:
        """Serve requests to their end."""
        self.requests = list(requests)
        while self.requests:
            self.step()

    def _admit(self) -> None:
        waiting = [r for r in self.requests if r.py_seq_slot is None and r.arrives <= self.steps]
        for request in waiting[: len(self.free)]:
            slot = self.free.pop()
            request.py_seq_slot, request.blocks, request.tokens = slot, self._blocks[slot], list(request.prompt)

    def step(self) -> None:
        """One step over all requests that have a slot."""
        self._admit()
        running = [r for r in self.requests if r.py_seq_slot is not None]
        self.steps += 1
        contexts = [r for r in running if r.in_context]
        generations = [r for r in running if not r.in_context]
        if generations and not contexts:
            for slot in self.free[: self.settings.padding]:
                dummy = Request([0], 1, tokens=[0, 0], cached=1, is_cuda_graph_dummy=True, blocks=self._blocks[slot])
                generations.append(dummy)
        if not running:
            return
        out = self._forward(contexts, generations)
        lengths, tokens = out["new_tokens_lens"].tolist(), out["new_tokens"].tolist()
        for row, request in enumerate([*contexts, *generations]):
            request.drafts = out["next_draft_tokens"][row].clone()
            if request in contexts:
                request.cached = min(request.cached + self.settings.chunk, len(request.prompt))
                if not request.in_context:
                    request.tokens.append(tokens[row][0])
                continue
            request.cached += lengths[row]
            request.tokens += tokens[row][: lengths[row]]
            request.counts.append(lengths[row])
        for request in running:
            if not request.in_context and len(request.tokens) - len(request.prompt) >= request.new_tokens:
                self._finish(request)

    def _finish(self, request: Request) -> None:
        assert request.py_seq_slot is not None
        self.storage.mark_invalid(request.py_seq_slot)
        self.free.append(request.py_seq_slot)
        self.requests.remove(request)

    # -- the pass ------------------------------------------------------------------------------------------------------

    def _forward(self, contexts: list[Request], generations: list[Request]) -> dict[str, Tensor]:
        nodes, requests = self.nodes, [*contexts, *generations]
        chunks = [min(self.settings.chunk, len(r.prompt) - r.cached) for r in contexts]
        lengths = [*chunks, *[nodes] * len(generations)]
        past = [r.cached for r in requests]
        self.storage.fill_all_slot_ids(contexts, generations)
        self.metadata.fill(len(contexts), lengths, past, [r.blocks for r in requests])
        self.metadata.update_spec_dec_param(
            batch_size=len(requests),
            is_spec_decoding_enabled=True,
            is_spec_dec_tree=True,
            is_spec_dec_dynamic_tree=True,
            max_draft_len=self.spec.max_draft_len,
            max_total_draft_tokens=nodes - 1,
            spec_metadata=self.spec_metadata,
            spec_tree_manager=self.resources.get_resource_manager("spec").spec_tree_manager,
            num_contexts=len(contexts),
        )
        tokens = [torch.tensor(r.prompt[r.cached : r.cached + n]) for r, n in zip(contexts, chunks, strict=True)]
        drafts = [torch.zeros(nodes - 1) if r.drafts is None else r.drafts for r in generations]
        tokens += [
            torch.cat([torch.tensor([r.tokens[-1]]), d.long()]) for r, d in zip(generations, drafts, strict=True)
        ]
        input_ids = torch.cat(tokens)
        position_ids = torch.cat([torch.arange(p, p + n) for p, n in zip(past, lengths, strict=True)]).int()
        hidden = self._target(input_ids, contexts, chunks, generations)
        ends = torch.tensor(chunks, dtype=torch.long).cumsum(0) - 1
        gather_ids = torch.cat([ends, torch.arange(sum(chunks), len(input_ids))])
        spec = self.spec_metadata
        spec.gather_ids = gather_ids
        spec.draft_tokens = torch.cat(drafts).int() if drafts else torch.zeros(0, dtype=torch.int32)
        spec.temperatures = torch.full((len(gather_ids),), self.settings.temperature)
        spec.request_temperatures = torch.full((len(requests),), self.settings.temperature)
        spec.top_ks = spec.top_ps = spec.temperatures  # unused: no filter
        spec.request_top_ks = spec.request_top_ps = spec.request_temperatures
        out: dict[str, Tensor] = self.worker(
            input_ids=input_ids.int(),
            position_ids=position_ids[None],
            hidden_states=hidden,
            logits=self.decoder.logits(hidden[gather_ids]),
            attn_metadata=self.metadata,
            spec_metadata=spec,
            draft_model=self.drafters,
            resource_manager=self.resources,
        )
        return out

    def _target(
        self, input_ids: Tensor, contexts: list[Request], chunks: list[int], generations: list[Request]
    ) -> Tensor:
        """Hidden states [T, E]; K/V of all rows goes behind the contexts, features into the metadata."""
        layers = tuple(self.spec_metadata.layers_to_capture)
        hidden, features, start = list[Tensor](), list[Tensor](), 0
        for request, count in zip(contexts, chunks, strict=True):
            table = torch.tensor([request.blocks])
            rows = Rows.chain(count, Where(table, torch.tensor([request.cached])))
            hidden.append(self._rows(input_ids[None, start : start + count], rows, features, layers))
            start += count
        if generations:
            nodes, count = self.nodes, len(generations)
            past = self.metadata.kv_lens_cuda[len(contexts) : len(contexts) + count].long() - nodes
            offsets = self.metadata.spec_decoding_position_offsets[: count * nodes].view(count, nodes).long()
            mask = self.metadata.tree_mask(count, nodes)
            table = torch.tensor([r.blocks for r in generations])
            rows = Rows(past[:, None] + offsets, mask, Where(table, past))
            hidden.append(self._rows(input_ids[start:].view(count, nodes), rows, features, layers))
        captured = torch.cat(features)
        self.spec_metadata.hidden_states[: len(captured)] = captured
        return torch.cat(hidden)

    def _rows(self, tokens: Tensor, rows: Rows, features: list[Tensor], layers: tuple[int, ...]) -> Tensor:
        out = self.decoder(tokens, rows, self.pool, layers)
        places = rows.where.context_len[:, None] + torch.arange(tokens.shape[1])
        self._write(out.k, out.v, rows.where.pages, places)
        features.append(out.features.flatten(0, 1))
        hidden: Tensor = out.hidden.flatten(0, 1)
        return hidden

    def _write(self, k: Tensor, v: Tensor, table: Tensor, places: Tensor) -> None:
        """K/V [L, B, T, H, D]; block 0 is one like any other here."""
        page = self.settings.tokens_per_block
        blocks = table.gather(1, places // page)
        self.pool.k[:, blocks, places % page], self.pool.v[:, blocks, places % page] = k, v

    def cached_keys(self, request: Request) -> tuple[Tensor, Tensor]:
        """The K/V [L, S, Hkv, D] of a request's committed tokens."""
        places = torch.arange(request.cached)
        page = self.settings.tokens_per_block
        blocks = torch.tensor(request.blocks)[places // page]
        return self.pool.k[:, blocks, places % page], self.pool.v[:, blocks, places % page]
