"""DSpine against a reference that shares no line with it, written from the paper's formulas: loops over slots, heads
and keys in float64, on plain NumPy vectors; one slot after the other, since none sees what is behind it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from d2sd.modeling.draft_head import draft_tables
from d2sd.modeling.drafters.dflash import Drafter
from d2sd.modeling.drafters.head_configs import InjectionConfig
from d2sd.modeling.kv_pool import CommittedRows, Rows
from d2sd.modeling.prepare import prepare_for_inference
from d2sd.modeling.tensor_parallel import SharedHead
from d2sd.modeling.where import Where
from d2sd.plugins.choice import candidates
from d2sd.plugins.layer_ops import Behind
from d2sd.runtime.sampling.sample import Sampling
from d2sd.runtime.sampling_params import SamplingParams
from tests.modeling.loops import Vector, attention, behind_attention, heads, of_layer, rms_norm
from tests.tiny import pool_for, random_tokens, tiny_decoder, tiny_drafter

TARGET = tiny_decoder("qwen3", layers=4, hidden=16, heads=4, kv_heads=2, head_dim=6, tie=False)
SIZE, MASK, VOCABULARY, POOL = 5, 63, 64, 6


def drafter_of(layers: int = 2) -> Drafter:
    head, attention = InjectionConfig(rank=7, message=5, candidates=POOL), {"causal": (True,) * layers}
    drafter = tiny_drafter(
        TARGET.config, layers=layers, block_size=SIZE, head=head, attention=attention
    )  # fmt: skip
    drafter.join(TARGET)
    return drafter


class Reference:
    """One block behind one context: what each of its slots says."""

    def __init__(self, drafter: Drafter, features: Tensor, block: Sequence[int]) -> None:
        """features [C, n·E] of the context; `block`: the anchor, more tokens or none, and masks."""
        self.weights = {name: x.double().numpy() for name, x in drafter.state_dict().items()}
        self.body, self.head = drafter.config.body, TARGET.head.double().numpy()
        embedding, eps = TARGET.embed_tokens.weight.double().numpy(), self.body.rms_norm_eps
        context = [
            rms_norm(self.weights["fc.weight"] @ one, self.weights["hidden_norm.weight"], eps)
            for one in features.double().numpy()
        ]
        self.keys: list[list[Vector]] = [[] for _ in range(self.body.num_layers)]
        self.values: list[list[Vector]] = [[] for _ in range(self.body.num_layers)]
        for place, x in enumerate(context):
            for layer in range(self.body.num_layers):
                self.see(layer, x, place)
        #: By the slot: its row before the last injection, and behind it.
        self.before: list[Vector] = []
        self.behind: list[Vector] = []
        told: list[Vector] = []  # by the layer: what the slot before says of its token
        for slot, token in enumerate(block):
            x, said = embedding[token], []
            for layer in range(self.body.num_layers):
                x = self.layer(layer, x, len(context) + slot)
                said.append(self.predicted(layer, x) if token == MASK else self.code(token))
                if layer == self.body.num_layers - 1:
                    self.before.append(x)
                if slot:
                    x = self.injected(layer, x, told[layer])
            self.behind.append(x)
            told = said

    def see(self, layer: int, x: Vector, place: int) -> None:
        """Keep the key and the value of a row."""
        w = of_layer(self.weights, layer)
        self.keys[layer].append(heads("k", x, place, w, self.body))
        self.values[layer].append(heads("v", x, place, w, self.body))

    def layer(self, layer: int, x: Vector, place: int) -> Vector:
        """A row behind a layer, in front of the injection; its key and value join the others."""
        w = of_layer(self.weights, layer)
        normed = rms_norm(x, w["input_layernorm.weight"], self.body.rms_norm_eps)
        self.see(layer, normed, place)
        queries = heads("q", normed, place, w, self.body)
        return behind_attention(
            x + attention(queries, self.keys[layer], self.values[layer], w, self.body), w, self.body
        )

    def predicted(self, layer: int, x: Vector) -> Vector:
        told: Vector = self.weights[f"injection.readouts.{layer}.weight"] @ x
        length = math.sqrt(sum(float(number) ** 2 for number in told))
        return told * math.sqrt(len(told)) / length

    def code(self, token: int) -> Vector:
        found: Vector = self.weights["injection.transfer_codes"][token]
        return found * math.sqrt(len(found))

    def injected(self, layer: int, x: Vector, told: Vector) -> Vector:
        w, own = self.weights, self.predicted(layer, x)
        message, size = w["injection.message.weight"] @ told, math.sqrt(sum(float(n) ** 2 for n in x) / len(x))
        for unit in range(len(message)):
            gate = sum(float(a) * float(b) for a, b in zip(w["injection.receiver_gate.weight"][unit], own, strict=True))
            gate += float(w["injection.predecessor_gate.weight"][unit] @ told) + float(w["injection.bias"][unit])
            message[unit] /= 1 + math.exp(-gate)
        out: Vector = x + size * (w[f"injection.writes.{layer}.weight"] @ message)
        return out

    def logits(self, x: Vector) -> Vector:
        out: Vector = self.head @ rms_norm(x, self.weights["norm.weight"], self.body.rms_norm_eps)
        return out

    def score(self, slot: int, parent: int) -> Vector:
        """Scores of all tokens in a slot behind this one."""
        return self.logits(self.injected(self.body.num_layers - 1, self.before[slot], self.code(parent)))


LENGTHS = (9, 6, 0)
BLOCKS = ([[5]], [[11, 7], [9], [2, 3, 8]])


def passed(drafter: Drafter, shown: Sequence[Sequence[int]]) -> tuple[Drafter, Tensor, Tensor, Tensor, Tensor]:
    """The drafter that served, and of each request one block for each of `shown`, which the blocks begin with: blocks
    [B, K, G], hidden states and logits [B, K, S, ..]; and the context's features.
    """
    target, served = prepare_for_inference(TARGET, {0: drafter})
    one, tables = served[0], draft_tables(target, served)[0]
    assert isinstance(one, Drafter)
    features = TARGET.full_pass(random_tokens(TARGET, 3, 9, seed=8), drafter.config.target_layer_ids).features
    pool, table = pool_for(drafter.config.body, 3, 16)
    context, places = torch.tensor(LENGTHS), torch.arange(9).expand(3, -1)
    new = CommittedRows(features, (table,), places, places < context[:, None], pool.page_size)
    blocks = torch.tensor([[*tokens, *[MASK] * (SIZE - len(tokens))] for tokens in shown]).expand(3, -1, -1)
    number = torch.arange(len(shown) * SIZE)
    same = (number[:, None] // SIZE == number // SIZE).expand(3, -1, -1)
    rows = Rows(Behind(context, (number % SIZE).expand(3, -1)), same, Where(table, context))
    hidden = one.draft_hidden(blocks, rows, pool, new, tables)
    return one, blocks, hidden, one.logits(hidden, blocks[:, :, 0], tables), features


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("shown", BLOCKS)
def test_logits_and_scores_of_all_pairs_equal_the_reference(shown: list[list[int]], layers: int) -> None:
    """Contexts of several pages, of part of one, and none; one block, and three of which two begin with more tokens."""
    drafter = drafter_of(layers)
    one, blocks, hidden, logits, features = passed(drafter, shown)
    assert one.head is not None
    every = torch.arange(VOCABULARY)
    added = one.head.added(hidden, every.expand(*hidden.shape[:3], -1), every.expand(*hidden.shape[:3], -1))
    for row, length in enumerate(LENGTHS):
        for k in range(len(shown)):
            expected = Reference(drafter, features[row, :length], blocks[row, k].tolist())
            for slot in range(1, SIZE):
                said = torch.from_numpy(expected.logits(expected.behind[slot]))
                torch.testing.assert_close(logits[row, k, slot - 1].double(), said, rtol=1e-5, atol=1e-5)
                scores = logits[row, k, slot - 1].double() + added[row, k, slot - 1].double()
                wanted = torch.from_numpy(np.array([expected.score(slot, parent) for parent in range(VOCABULARY)]))
                torch.testing.assert_close(scores, wanted, rtol=1e-5, atol=2e-5)  # a sum of two roundings


def test_a_chain_is_that_of_one_slot_after_the_other() -> None:
    """Each token the best of its slot's candidates behind the token before, as if nothing had been computed ahead."""
    drafter = drafter_of()
    one, blocks, hidden, logits, features = passed(drafter, [[5]])
    sampling = Sampling.of([SamplingParams()] * 3, VOCABULARY, "cpu")
    draft = candidates(logits, torch.tensor(LENGTHS), sampling, POOL)
    chain = one.conditioned(draft, hidden, blocks, sampling.temperature, 1)
    for row, length in enumerate(LENGTHS):
        expected, parent, taken = Reference(drafter, features[row, :length], blocks[row, 0].tolist()), 5, []
        for slot in range(1, SIZE):
            pool = np.argsort(-expected.logits(expected.behind[slot]))[:POOL]
            parent = int(max(pool, key=expected.score(slot, parent).__getitem__))
            taken.append(parent)
        assert chain.tokens[row, 0, :, 0].tolist() == taken
    assert not torch.equal(chain.top1, draft.top1)


def test_no_slot_depends_on_what_is_behind_it() -> None:
    """A token that a branch shows changes the slots behind it, by its code too."""
    drafter = drafter_of()
    (_, _, two, _, _), (_, _, three, _, _) = (passed(drafter, [shown]) for shown in ([5, 7], [5, 7, 9]))
    torch.testing.assert_close(two[..., :1, :], three[..., :1, :])
    assert (two[..., 1:, :] - three[..., 1:, :]).abs().amin((0, 1, 3)).max() > 0
    before = drafter.state_dict()["injection.transfer_codes"][9].clone()
    drafter.get_parameter("injection.transfer_codes")[9] *= -1
    (_, _, told, _, _), (_, _, same, _, _) = (passed(drafter, [shown]) for shown in ([5, 7, 9], [5, 7]))
    torch.testing.assert_close(told[..., :2, :], three[..., :2, :])  # the row that holds it, too
    assert (told[..., 2:, :] - three[..., 2:, :]).abs().max() > 1e-3
    torch.testing.assert_close(same, two)
    drafter.get_parameter("injection.transfer_codes")[9] = before


def test_ranks_gather_the_head_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a part of the head of a target that they share."""
    drafter, calls = drafter_of(), list[Tensor]()
    target = tiny_decoder("qwen3", layers=4, hidden=16, heads=4, kv_heads=2, head_dim=6, tie=False)
    drafter.join(target)

    def rows(_shared: SharedHead, weight: Tensor, ids: Tensor) -> Tensor:
        calls.append(ids)
        return 2 * weight[ids]

    monkeypatch.setattr(SharedHead, "rows", rows)
    target.shared_head = SharedHead.__new__(SharedHead)
    assert drafter.head is not None
    for _ in range(2):
        assert torch.equal(drafter.head.successors, 2 * target.head)
    assert len(calls) == 1
