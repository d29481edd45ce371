"""The drafter against a reference that shares no line with it (loops.py).

Shape letters: B requests, G block size, K branches, C context tokens, E hidden, D head size, n auxiliary layers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from d2sd.modeling.drafters.dflash import Drafter
from d2sd.modeling.drafters.head_configs import SelectorConfig
from d2sd.modeling.kv_pool import KVPool, Rows
from d2sd.modeling.where import Where
from tests.modeling.loops import draft as draft_of_loops
from tests.tiny import pool_for, random_tokens, tiny_decoder, tiny_drafter

TARGET = tiny_decoder("qwen3", layers=4, hidden=16, heads=4, kv_heads=2, head_dim=6)  # heads wider than hidden together
DRAFTER = tiny_drafter(TARGET.config, layers=2, block_size=4)
GAMMA = DRAFTER.config.block_size


def reference(drafter: Drafter, features: Tensor, positions: Tensor, tokens: Tensor, block_positions: Tensor) -> Tensor:
    """features [C, n·E], tokens [G] -> [G, E], through the loops."""
    weights = {name: x.double().numpy() for name, x in drafter.state_dict().items()}
    embedding: Any = TARGET.embed_tokens.weight.double().numpy()
    out = draft_of_loops(
        weights,
        drafter.config.body,
        list(features.double().numpy()),
        positions.tolist(),
        [embedding[token] for token in tokens.tolist()],
        block_positions.tolist(),
    )
    return torch.from_numpy(np.array(out))


# --- Running the drafter as the runtime does -----------------------------------------------------------------------


def features_of(batch: int, length: int) -> Tensor:
    """[B, C, n·E] as the target gives them."""
    tokens = random_tokens(TARGET, batch, length, seed=7)
    return TARGET.full_pass(tokens, aux_layer_ids=DRAFTER.config.target_layer_ids).features


def inject(drafter: Drafter, pool: KVPool, page_table: Tensor, features: Tensor, start: Tensor) -> None:
    """Context tokens from `start [B]` on join the drafter's pages."""
    positions = start[:, None] + torch.arange(features.shape[1])
    k, v = drafter.context_keys_values(features, positions)
    pool.write(k, v, (page_table,), positions, torch.ones_like(positions, dtype=torch.bool))


def context_pool(drafter: Drafter, features: Tensor, context_len: Tensor) -> tuple[KVPool, Tensor]:
    """A pool holding the first `context_len [B]` tokens of each request, the rest still NaN."""
    pool, page_table = pool_for(drafter.config.body, len(features), features.shape[1])
    for request, length in enumerate(context_len.tolist()):
        one = slice(request, request + 1)
        inject(drafter, pool, page_table[one], features[one, :length], torch.tensor([0]))
    return pool, page_table


def block_rows(page_table: Tensor, context_len: Tensor, copies: int = 1) -> Rows:
    """`copies` blocks side by side behind each context, each at the same positions, none seeing another."""
    batch = len(context_len)
    positions = (context_len[:, None] + torch.arange(GAMMA)).repeat(1, copies)
    block = torch.arange(copies).repeat_interleave(GAMMA)
    attn_mask = (block[:, None] == block).expand(batch, -1, -1)
    return Rows(positions, attn_mask, Where(page_table, context_len))


def draft(drafter: Drafter, tokens: Tensor, rows: Rows, pool: KVPool) -> Tensor:
    out = drafter(TARGET.embed_tokens(tokens), rows.positions, pool.attend(rows))
    assert isinstance(out, Tensor)
    return out


def first_blocks(anchors: list[int]) -> Tensor:
    """[B, G]: an anchor and masks."""
    blocks = torch.full((len(anchors), GAMMA), DRAFTER.config.mask_token_id)
    blocks[:, 0] = torch.tensor(anchors)
    return blocks


def branch_blocks(anchor: int, drafts: list[int], boundaries: list[int]) -> Tensor:
    """[K, G]: anchor, the first `i` drafts, masks from there on; one line a boundary i."""
    line = [anchor, *drafts]
    return torch.tensor(
        [[line[slot] if slot <= i else DRAFTER.config.mask_token_id for slot in range(GAMMA)] for i in boundaries]
    )


# --- Tests ---------------------------------------------------------------------------------------------------------


def test_first_draft_equals_reference() -> None:
    """A batch of different context lengths: several pages, part of a page, and none (a prompt of one token)."""
    context_len = torch.tensor([9, 3, 0])
    features = features_of(3, 9)
    pool, page_table = context_pool(DRAFTER, features, context_len)
    tokens = first_blocks([5, 11, 2])
    rows = block_rows(page_table, context_len)
    out = draft(DRAFTER, tokens, rows, pool)
    for request, length in enumerate(context_len.tolist()):
        expected = reference(
            DRAFTER, features[request, :length], torch.arange(length), tokens[request], rows.positions[request]
        )
        torch.testing.assert_close(out[request].double(), expected, rtol=0, atol=1e-4)
        expected_logits = expected @ TARGET.head.double().T
        assert TARGET.logits(out[request]).argmax(-1).tolist() == expected_logits.argmax(-1).tolist()


@pytest.mark.parametrize("role", ["first", "variable_prefix"])
@pytest.mark.parametrize("taps", [0, 1, 2, 3])
def test_second_draft_equals_one_pass_a_branch(role: Any, taps: int) -> None:
    """K branches in one block-diagonal pass: each equals the reference, and a pass of its own; in either role, and with
    convolutions, which begin again at every branch.
    """
    head = SelectorConfig(rank=4, candidates=8, taps=taps, group=4) if taps else None
    drafter = tiny_drafter(TARGET.config, role=role, block_size=GAMMA, head=head, seed=3)
    context_len = torch.tensor([6, 9])
    features = features_of(2, 9)
    pool, page_table = context_pool(drafter, features, context_len)
    branches = torch.stack([branch_blocks(5, [8, 9, 10], [0, 1, 2]), branch_blocks(30, [31, 32, 33], [2, 0, 1])])
    together = draft(drafter, branches.flatten(1), block_rows(page_table, context_len, copies=3), pool)
    together = together.view(2, 3, GAMMA, -1)
    rows = block_rows(page_table, context_len)
    for branch in range(3):
        alone = draft(drafter, branches[:, branch], rows, pool)
        torch.testing.assert_close(together[:, branch], alone, rtol=0, atol=1e-4)
        for request, length in enumerate(context_len.tolist()):
            expected = reference(
                drafter,
                features[request, :length],
                torch.arange(length),
                branches[request, branch],
                rows.positions[request],
            )
            # on AMD's processors MKL sums in an order that is 2e-5 away
            torch.testing.assert_close(together[request, branch].double(), expected, rtol=5e-5, atol=5e-5)


@pytest.mark.parametrize(
    "pieces",
    [
        pytest.param([1] * 11, id="one token a step: nothing accepted but the bonus token"),
        pytest.param([6, 1, 4], id="a prompt, then steps of other sizes"),
        pytest.param([4, 4, 3], id="page by page"),
    ],
)
def test_context_injected_in_pieces_equals_full_recomputation(pieces: list[int]) -> None:
    features, context_len = features_of(2, 11), torch.tensor([11, 11])
    whole_pool, whole_table = context_pool(DRAFTER, features, context_len)
    pool, page_table = pool_for(DRAFTER.config.body, 2, 11, page_size=4, seed=5)
    tokens = first_blocks([5, 6])
    done = 0
    for size in pieces:
        inject(DRAFTER, pool, page_table, features[:, done : done + size], torch.tensor([done, done]))
        done += size
        draft(DRAFTER, tokens, block_rows(page_table, torch.tensor([done, done])), pool)  # leaves no trace in the pages
    expected = draft(DRAFTER, tokens, block_rows(whole_table, context_len), whole_pool)
    out = draft(DRAFTER, tokens, block_rows(page_table, context_len), pool)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-4)


def test_positions_are_absolute() -> None:
    """Context token j stands at j and the block behind it. RoPE sees distances: moving both changes nothing, moving the
    context alone (as if it began at 0 in every chunk) changes the draft."""
    features, length = features_of(1, 6), torch.tensor([6])
    tokens = first_blocks([5])

    def at(context_start: int, block_start: int) -> Tensor:
        positions = torch.arange(6)[None]
        k, v = DRAFTER.context_keys_values(features, positions + context_start)
        pool, page_table = pool_for(DRAFTER.config.body, 1, 6)
        pool.write(k, v, (page_table,), positions, torch.ones_like(positions, dtype=torch.bool))
        rows = block_rows(page_table, length)
        return draft(
            DRAFTER, tokens, Rows(rows.positions + block_start - 6, rows.attn_mask, Where(page_table, length)), pool
        )

    torch.testing.assert_close(at(40, 46), at(0, 6), rtol=0, atol=1e-4)
    assert (at(1, 6) - at(0, 6)).abs().max() > 1e-2
    assert (at(0, 7) - at(0, 6)).abs().max() > 1e-2
    moved = reference(DRAFTER, features[0], torch.arange(6) + 1, tokens[0], torch.arange(GAMMA) + 6)
    torch.testing.assert_close(at(1, 6)[0].double(), moved, rtol=0, atol=1e-4)


def test_parameter_names_are_the_checkpoint_layouts() -> None:
    """Names and shapes of a z-lab drafter, 3 tensors and 11 a layer: what stock consumers of DFlash load."""
    c = DRAFTER.config.body
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    layer = {
        "self_attn.q_proj.weight": (q, c.hidden_size),
        "self_attn.k_proj.weight": (kv, c.hidden_size),
        "self_attn.v_proj.weight": (kv, c.hidden_size),
        "self_attn.o_proj.weight": (c.hidden_size, q),
        "self_attn.q_norm.weight": (c.head_dim,),
        "self_attn.k_norm.weight": (c.head_dim,),
        "mlp.gate_proj.weight": (c.intermediate_size, c.hidden_size),
        "mlp.up_proj.weight": (c.intermediate_size, c.hidden_size),
        "mlp.down_proj.weight": (c.hidden_size, c.intermediate_size),
        "input_layernorm.weight": (c.hidden_size,),
        "post_attention_layernorm.weight": (c.hidden_size,),
    }
    expected = {f"layers.{i}.{name}": shape for i in range(c.num_layers) for name, shape in layer.items()}
    expected |= {
        "fc.weight": (c.hidden_size, len(DRAFTER.config.target_layer_ids) * c.hidden_size),
        "hidden_norm.weight": (c.hidden_size,),
        "norm.weight": (c.hidden_size,),
    }
    assert {name: tuple(x.shape) for name, x in DRAFTER.state_dict().items()} == expected


# --- The draft vocabulary ------------------------------------------------------------------------------------------


def test_draft_ids_follow_the_model_and_are_no_part_of_its_state() -> None:
    config = replace(DRAFTER.config, draft_vocabulary=(1, 5, 60))
    with torch.device("meta"):
        drafter = Drafter(config)
    drafter.load_state_dict(DRAFTER.state_dict(), strict=True, assign=True)
    ids = drafter.to(torch.bfloat16).draft_ids
    assert ids is not None
    assert ids.dtype == torch.int64
    assert ids.tolist() == [1, 5, 60]
    assert drafter.state_dict().keys() == DRAFTER.state_dict().keys()
    assert len(list(drafter.parameters())) == len(list(DRAFTER.parameters()))
    moved = drafter.to("meta").draft_ids  # any other device would do
    assert moved is not None
    assert moved.is_meta
    assert DRAFTER.draft_ids is None


@pytest.mark.parametrize("ids", [(), (4,), (4, 4), (5, 4), (-1, 4), (4, 64), (4, 63)], ids=str)
def test_a_vocabulary_that_cannot_be(ids: tuple[int, ...]) -> None:
    """Too small, not ascending, outside the target's, or with the mask."""
    with pytest.raises(AssertionError):
        replace(DRAFTER.config, draft_vocabulary=ids)
