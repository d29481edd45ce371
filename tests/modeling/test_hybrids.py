"""Hybrids, whose layers attend or have a state: logits are transformers', rows of a tree those of its paths."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from d2sd.modeling.decoder import Decoder, DecoderOutput
from d2sd.modeling.kv_pool import Chunks, KVPool, PoolSizes, Rows
from d2sd.modeling.where import Where
from tests.modeling.hybrids import CONFIGS, check_features, pair
from tests.tiny import ancestor_mask, full_logits, path_to, random_tokens, random_tree

#: Of logits whose spread is about 1, in fp32: far above rounding (1e-5), far below any mistake.
TOLERANCE = 1e-4
PAGE = 4
cases = pytest.mark.parametrize("case", CONFIGS)


class Requests:
    """Requests of one model: their pages, states and lengths, as the runtime keeps them."""

    def __init__(self, decoder: Decoder, batch: int, tokens: int) -> None:
        self.decoder, columns = decoder, -(-tokens // PAGE)
        dtype = decoder.embed_tokens.weight.dtype
        self.pool = KVPool(decoder.config.body, PoolSizes(1 + batch * columns, PAGE, states=batch + 2), dtype, "cpu")
        for memory in self.pool.tensors:
            memory.fill_(torch.nan)
        assert self.pool.states is not None
        self.states = self.pool.states
        for memory in self.states.tensors:
            memory[:, 1:] = torch.nan
        self.table = 1 + torch.randperm(batch * columns).view(batch, columns)
        self.state_ids = 1 + torch.randperm(batch + 1)[:batch]
        self.length = torch.zeros(batch, dtype=torch.long)
        self.states.copy(torch.zeros_like(self.state_ids), self.state_ids)

    def prompt(self, tokens: Tensor, lengths: list[int] | None = None) -> Tensor:
        """Chunks of all requests, as one pass [1, N] -> hidden states [N, E]."""
        lengths = lengths or [tokens.shape[1]] * len(tokens)
        chunks = Chunks.of(lengths, Where(self.table, self.length, state_ids=self.state_ids), PAGE)
        out = self.decoder(tokens.reshape(1, -1), chunks, self.pool)
        self.pool.write_rows(out.k[:, 0], out.v[:, 0], chunks.pages, chunks.positions[0])
        self.length = self.length + torch.tensor(lengths)
        assert out.states is None
        hidden: Tensor = out.hidden[0]
        return hidden

    def tree(self, tokens: Tensor, parents: list[int]) -> DecoderOutput:
        """Nodes [B, T] of one tree for all requests, none of them committed."""
        mask = ancestor_mask(parents).expand(len(tokens), -1, -1)
        depth = torch.tensor([len(path_to(node, parents)) - 1 for node in range(len(parents))])
        rows = Rows(self.length[:, None] + depth, mask, Where(self.table, self.length, state_ids=self.state_ids))
        out = self.decoder(tokens, rows, self.pool)
        assert isinstance(out, DecoderOutput)
        return out

    def commit(self, out: DecoderOutput, path: Tensor, count: Tensor) -> None:
        """The first `count` [B] nodes of `path` [B, G]."""
        keep = torch.arange(path.shape[1]) < count[:, None]
        positions = self.length[:, None] + torch.arange(path.shape[1])
        self.pool.write(out.k, out.v, (self.table,), positions, keep, path)
        assert out.states is not None
        out.states.commit(self.states, self.state_ids, path, count)
        self.length = self.length + count

    def decode(self, tokens: Tensor) -> Tensor:
        """One token of each request [B] -> hidden states [B, E]."""
        out = self.tree(tokens[:, None], [-1])
        self.commit(out, torch.zeros(len(tokens), 1, dtype=torch.long), torch.ones(len(tokens), dtype=torch.long))
        hidden: Tensor = out.hidden[:, 0]
        return hidden


@pytest.mark.sampled(3)
@cases
@pytest.mark.parametrize("batch", [1, 8])
def test_one_pass(case: str, batch: int) -> None:
    tokens = random_tokens(pair(case).ours, batch, 70)
    expected = pair(case).expected(tokens)
    assert expected.std() > 0.9
    torch.testing.assert_close(full_logits(pair(case).ours, tokens), expected, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(full_logits(pair(case).copy(), tokens), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.sampled(7)
@cases
@pytest.mark.parametrize("batch", [1, 8])
def test_prompt_in_chunks_then_decoding(case: str, batch: int) -> None:
    decoder = pair(case).copy()
    tokens = random_tokens(decoder, batch, 40)
    for sizes in ((31,), (7, 16, 8), (1, 2, 3, 25)):
        requests, hidden, done = Requests(decoder, batch, 40), [], 0
        for size in sizes:
            hidden.append(requests.prompt(tokens[:, done : done + size]).view(batch, size, -1))
            done += size
        hidden += [requests.decode(tokens[:, at])[:, None] for at in range(done, 40)]
        found = decoder.logits(torch.cat(hidden, 1))
        torch.testing.assert_close(found, pair(case).expected(tokens), rtol=0, atol=TOLERANCE)


@pytest.mark.sampled(7)
@cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_speculation_has_the_bits_of_plain_decoding(case: str, dtype: torch.dtype) -> None:
    """Hidden states, states and pages: prompts cut anywhere, others in the batch, trees of which a path is accepted."""
    decoder = pair(case).copy(dtype)
    tokens = random_tokens(decoder, 3, 48, seed=5)
    plain = Requests(decoder, 1, 48)
    expected = [plain.decode(tokens[1:2, at])[0] for at in range(40)]
    for cut in (3, 11, 17):
        requests = Requests(decoder, 3, 60)
        requests.prompt(tokens[:, :cut])
        ends = 21, 20, 24
        lengths = [end - cut for end in ends]
        rest = torch.cat([text[cut:end] for text, end in zip(tokens, ends, strict=True)])
        hidden = requests.prompt(rest[None], lengths)
        assert torch.equal(hidden[lengths[0] :][: lengths[1]], torch.stack(expected[cut:20]))
        done, generator = 20, torch.Generator().manual_seed(cut)
        while done < 40:
            parents = random_tree(12, seed=cut + done)
            accepted = max((path_to(node, parents) for node in range(12)), key=len)[: 40 - done]
            nodes = torch.randint(64, (3, 12), generator=generator)
            nodes[1, accepted] = tokens[1, done : done + len(accepted)]
            out = requests.tree(nodes, parents)
            assert torch.equal(out.hidden[1, accepted], torch.stack(expected[done : done + len(accepted)]))
            path = torch.tensor([accepted]).expand(3, -1)
            requests.commit(out, path, torch.tensor([1, len(accepted), min(2, len(accepted))]))
            done += len(accepted)
        for ours, alone in zip(requests.states.tensors, plain.states.tensors, strict=True):
            assert torch.equal(ours[:, requests.state_ids[1]], alone[:, plain.state_ids[0]])
            assert not ours[:, 0].any()


@cases
def test_rows_of_a_tree_have_the_logits_of_their_paths(case: str) -> None:
    decoder = pair(case).copy()
    prompt, parents = random_tokens(decoder, 2, 13), random_tree(24, seed=3)
    nodes = random_tokens(decoder, 2, 24, seed=9)
    requests = Requests(decoder, 2, 40)
    requests.prompt(prompt)
    logits = decoder.logits(requests.tree(nodes, parents).hidden)
    for node in range(24):
        text = torch.cat([prompt, nodes[:, path_to(node, parents)]], 1)
        expected = pair(case).expected(text)[:, -1]
        torch.testing.assert_close(logits[:, node], expected, rtol=0, atol=TOLERANCE)


@cases
@torch.no_grad()
def test_features_are_outputs_of_the_layers(case: str) -> None:
    """Layers are a gated delta net, one that attends, and the last one, before the last norm."""
    check_features(pair(case).copy(), pair(case).theirs, (0, 1, 4), TOLERANCE)
