"""A small server on the fake TensorRT-LLM: our registration makes its draft model and worker, requests go in step."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from d2sd.convert.kinds import DFLASH
from d2sd.integrations.trtllm.register import SINGLE_PROCESS
from d2sd.modeling.decoder import Decoder
from d2sd.modeling.drafters.dflash import Drafter
from d2sd.modeling.kv_pool import Rows
from tests.d2sd.integrations.trtllm import fake
from tests.tiny import feed, pool_for, tiny_decoder, tiny_drafter

#: So few tokens that random drafters are right now and then.
VOCABULARY = 7


def models(block_size: int = 5, second_layers: int = 3) -> tuple[Decoder, Drafter, Drafter]:
    """A target and two drafters, of which the second is the deeper one: their shares of the cache differ."""
    decoder = tiny_decoder(vocab=VOCABULARY, seed=3)
    first = tiny_drafter(decoder.config, block_size=block_size, seed=4)
    second = tiny_drafter(decoder.config, role="variable_prefix", layers=second_layers, block_size=block_size, seed=5)
    return decoder, first, second


def write_bundle(folder: Path, first: Drafter, second: Drafter) -> Path:
    """The part of a bundle that the module reads."""
    for name, drafter in (("drafter_first", first), ("drafter_second", second)):
        DFLASH.write(folder / name, drafter.config, drafter.state_dict())
    return folder


def single_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SINGLE_PROCESS, "1")
    monkeypatch.delenv("D2SD_TRTLLM", raising=False)


def specification(bundle: Path, **changes: Any) -> Any:
    """`model_config` of a server that was started with the bundle's YAML."""
    block = json.loads((bundle / "drafter_first" / "config.json").read_text())["block_size"]
    values = {
        "attention_backend": "VANILLA",
        "speculative_model": str(bundle / "drafter_first"),
        "max_draft_len": block - 1,
    }
    world = changes.pop("world_size", 1)
    return SimpleNamespace(spec_config=SimpleNamespace(**values | changes), mapping=SimpleNamespace(world_size=world))


def draft_model(bundle: Path, modules: dict[str, Any], config: Any) -> Any:
    """Build the draft model as the server does: from what is registered for DFlash."""
    mode = modules["interface"].SpeculativeDecodingMode.DFLASH
    values = json.loads((bundle / "drafter_first" / "config.json").read_text())
    draft_config = fake.ModelConfig(SimpleNamespace(**values), config.spec_config)
    return modules["modeling_utils"].get_registered_draft_model_builder(mode)(config, draft_config, None, None)


class Server:
    """Prompts are admitted at once; `step` yields the text of every request, and the drafts that come next."""

    def __init__(self, bundle: Path, modules: dict[str, Any], decoder: Decoder, prompts: list[list[int]]) -> None:
        config = specification(bundle)
        self.decoder, self.texts = decoder, [list(prompt) for prompt in prompts]
        self.drafter = draft_model(bundle, modules, config)
        self.drafter.logits_processor = lambda rows, head, metadata, flat: decoder.logits(rows)
        self.drafter.load_weights(load_file(bundle / "drafter_first" / "model.safetensors"), weight_mapper=None)
        self.drafter.load_weights_from_target_model(
            SimpleNamespace(model=SimpleNamespace(embed_tokens=decoder.embed_tokens), lm_head=nn.Identity())
        )
        self.worker = modules["utils"].get_spec_worker(config.spec_config, config, config.mapping)
        self.width = config.spec_config.max_draft_len + 1
        self.drafts = torch.zeros(len(prompts), self.width - 1, dtype=torch.long)
        self.aux_layer_ids = tuple(
            json.loads((bundle / "drafter_first" / "config.json").read_text())["dflash_config"]["target_layer_ids"]
        )
        self.pools = [pool_for(decoder.config.body, 1, 96, seed=i) for i in range(len(prompts))]
        self.metadata = SimpleNamespace(
            max_num_requests=len(prompts) + 2, max_seq_len=96, slots=torch.arange(len(prompts)) + 1
        )
        for slot, text, (pool, table) in zip(self.metadata.slots, self.texts, self.pools, strict=True):
            out = feed(
                decoder, torch.tensor([text[:-1]]), pool, table, torch.tensor([0]), aux_layer_ids=self.aux_layer_ids
            )
            self.worker.store_prefill_context(self.drafter, self.metadata, int(slot), out.features[0])

    def step(self) -> list[int]:
        """Verify the drafts, commit what agrees, draft anew. Returns how many tokens each request gained."""
        rows = torch.cat([torch.tensor([[text[-1]] for text in self.texts]), self.drafts], 1)
        outs = []
        for text, row, (pool, table) in zip(self.texts, rows, self.pools, strict=True):
            chain = Rows.chain(self.width, table, torch.tensor([len(text) - 1]))
            outs.append((self.decoder(row[None], chain, pool, self.aux_layer_ids), chain))
        self.metadata.captured = torch.cat([out.features[0] for out, _ in outs])
        logits = torch.cat([self.decoder.logits(out.hidden[0]) for out, _ in outs])
        said = self.worker._forward_impl(rows.flatten(), None, None, logits, object(), self.metadata, self.drafter)
        gained: list[int] = said["new_tokens_lens"].tolist()
        for index, ((out, chain), count) in enumerate(zip(outs, gained, strict=True)):
            keep = torch.arange(self.width)[None] < count
            pool, table = self.pools[index]
            pool.write(out.k, out.v, table, chain.positions, keep)
            self.texts[index] += said["new_tokens"][index, :count].tolist()
        self.drafts = said["next_draft_tokens"]
        return gained


def block_logits(decoder: Decoder, drafter: Drafter, text: list[int], block: list[int]) -> Tensor:
    """Return a drafter's logits [γ-1, V] for slots 1 .. γ-1 of a block behind `text[:-1]`, all computed anew."""
    context = torch.tensor([text[:-1]])
    pool, table = pool_for(drafter.config.body, 1, len(text) + len(block))
    target, pages = pool_for(decoder.config.body, 1, len(text))
    features = feed(
        decoder, context, target, pages, torch.tensor([0]), aux_layer_ids=drafter.config.target_layer_ids
    ).features
    positions = torch.arange(context.shape[1])[None]
    k, v = drafter.context_keys_values(features, positions)
    pool.write(k, v, table, positions, torch.ones_like(positions, dtype=torch.bool))
    start = torch.tensor([context.shape[1]])
    seen = torch.ones(1, len(block), len(block), dtype=torch.bool)
    rows = Rows(start[:, None] + torch.arange(len(block)), seen, table, start)
    hidden = drafter(decoder.embed_tokens(torch.tensor([block])), rows.positions, pool.attend(rows))
    return decoder.logits(hidden[0, 1:])
