"""The gated delta rule over trees against loops along every path, and against transformers' recurrence."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from torch import Tensor

from d2sd.plugins.cascade_attention import AttnMask, ChunkMask
from d2sd.plugins.delta_rule import DeltaRows, chunk_delta_rule, commit_delta_rule, tree_delta_rule
from tests.plugins.delta_rule.draws import Drawn, drawn, path_to
from tests.plugins.delta_rule.oracle import outputs, state_after

#: Trees of one test at every change, and of each part of the sweep.
FEW, MANY = 20, 220


def some_tree(seed: int, dtype: torch.dtype = torch.float32) -> Drawn:
    """One row to 256, chains and bushes, states of zeros and of thousands, keys from random to nearly equal."""
    draw = torch.Generator().manual_seed(seed)
    pick = torch.rand(6, generator=draw).tolist()
    return drawn(
        seed,
        nodes=max(1, round(256 ** pick[0])),
        batch=1,
        most_depth=(2, 4, 32, 256)[int(4 * pick[1])] if pick[0] < 0.8 else 32,
        chain=(0.0, 0.5, 0.9, 1.0)[int(4 * pick[2])],
        size=(64, 64, 64, 128, 256)[int(5 * pick[3])],
        gate=(0.0, 0.1, 5.0, 20.0)[seed % 4],
        state=(0.0, 1.0, 1.0, 1000.0)[int(4 * pick[4])],
        alike=(0.0, 0.0, 0.9)[int(3 * pick[5])],
        heads=((1, 1), (1, 2))[seed % 2],
        dtype=dtype,
    )


def off(found: Tensor, expected: Tensor, x: Drawn) -> float:
    """The largest difference, in units of what the largest state and value can give to an output."""
    scale = expected.abs().amax().clamp(min=1e-30)
    inputs = x.states.abs().amax().clamp(min=1.0)  # cancellation leaves an output below its terms
    return float((found.double() - expected).abs().amax() / torch.maximum(scale, inputs * x.q.shape[-1] ** -0.5))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("seed", range(FEW))
def test_trees_equal_loops(seed: int, exact: bool) -> None:
    x = some_tree(seed)
    assert off(tree_delta_rule(*x[:5], exact=exact), outputs(x), x) < 1e-5


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.full) for part in range(1, 9))])
def test_many_trees_equal_loops(part: int) -> None:
    for seed in range(FEW + part * MANY, FEW + (part + 1) * MANY):
        x = some_tree(seed)
        expected = outputs(x)
        for exact in (False, True):
            assert off(tree_delta_rule(*x[:5], exact=exact), expected, x) < 1e-5, seed


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_bf16_rows_round_once(seed: int, exact: bool) -> None:
    """Half a unit in the last place of the largest output."""
    x = some_tree(seed, torch.bfloat16)
    found = tree_delta_rule(*x[:5], exact=exact)
    assert found.dtype == torch.bfloat16
    assert off(found, outputs(x), x) < 2**-8


@pytest.mark.parametrize("exact", [False, True])
def test_gates_that_close_leave_no_infinities(exact: bool) -> None:
    """A gate of -inf is closed, and thousands of them in a row are no inf - inf."""
    x = drawn(3, 40, most_depth=256, chain=1.0, gate=0.0)
    x.rows.g[:, 10:20] = -1000.0
    assert off(tree_delta_rule(*x[:5], exact=exact), outputs(x), x) < 1e-5


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("number", [torch.nan, torch.inf, 3e38])
@pytest.mark.parametrize("part", ["k", "v", "g", "beta"])
def test_a_broken_row_reaches_its_descendants(part: str, number: float, exact: bool) -> None:
    """Outputs of other rows are the bits that they are beside a healthy one."""
    healthy = drawn(7, 20)
    for row in (0, 3, 10):
        x = drawn(7, 20)
        broken = getattr(x.rows, part)
        broken[0, row] = -number if part == "g" else number  # gates are at most 0
        found, expected = (tree_delta_rule(*one[:5], exact=exact) for one in (x, healthy))
        reached = torch.zeros(2, 20, dtype=torch.bool)
        reached[0] = x.mask[0, :, row]
        if exact:
            assert torch.equal(found[~reached], expected[~reached])
        torch.testing.assert_close(found[~reached], expected[~reached], rtol=1e-5, atol=1e-5)
        if number is torch.nan:
            assert found[reached].isnan().flatten(1).any(1).all()


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_a_broken_row_of_a_chunk_reaches_those_behind_it(number: float) -> None:
    x = drawn(7, 20, batch=1, chain=1.0, most_depth=256)
    chunks = ChunkMask((20,), torch.tensor([0, 20]))
    expected = chunk_delta_rule(x.q, x.rows, x.states.clone(), x.slots, chunks)
    x.rows.v[0, 12] = number
    states = x.states.clone()
    found = chunk_delta_rule(x.q, x.rows, states, x.slots, chunks)
    torch.testing.assert_close(found[:, :12], expected[:, :12], rtol=1e-5, atol=1e-5)
    assert not found[:, 12:].isfinite().flatten(2).all(-1).any()
    assert not states[x.slots].isfinite().all()


def test_rows_and_states_are_not_written() -> None:
    x = drawn(5, 30)
    before = [y.clone() for y in (x.q, x.states, *all_of(x.rows))]
    tree_delta_rule(*x[:5])
    tree_delta_rule(*x[:5], exact=True)
    assert all(torch.equal(a, b) for a, b in zip(before, (x.q, x.states, *all_of(x.rows)), strict=True))


def all_of(rows: DeltaRows) -> list[Tensor]:
    return [getattr(rows, field.name) for field in fields(rows)]


def part(rows: DeltaRows, *index: slice | None) -> DeltaRows:
    return DeltaRows(*(x[index] for x in all_of(rows)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exact_outputs_are_plain_decoding_bit_for_bit(dtype: torch.dtype) -> None:
    """Decoding one row a step, each committed, along a path of a tree of other rows and beside other requests."""
    x = drawn(11, 50, batch=3, dtype=dtype)
    whole = tree_delta_rule(*x[:5], exact=True)
    for request in range(3):
        states, slot = x.states.clone(), x.slots[request : request + 1]
        for row in path_to(x.parents[request], 49):
            one = part(x.rows, slice(request, request + 1), slice(row, row + 1))
            itself = AttnMask(torch.ones(1, 1, 1, dtype=torch.bool))
            q = x.q[request : request + 1, row : row + 1]
            assert torch.equal(tree_delta_rule(q, one, states, slot, itself, exact=True)[0, 0], whole[request, row])
            stacked, path = part(one, None), torch.zeros(1, 4, dtype=torch.long)
            commit_delta_rule(stacked, states[None], slot, path, torch.tensor([1]))


def test_a_commit_equals_loops_whatever_its_grouping() -> None:
    """Two layers, three requests of which one is padding: paths at once, and row by row, in the same bits."""
    x = drawn(13, 40, batch=3, chain=0.9)
    slots = torch.tensor([3, 0, 1])
    x = x._replace(slots=slots)
    other = drawn(14, 40, batch=3, chain=0.9)
    rows = DeltaRows(*(torch.stack(pair) for pair in zip(all_of(x.rows), all_of(other.rows), strict=True)))
    states = torch.stack([x.states, other.states])
    paths = [path_to(parents, 39) for parents in x.parents]
    count = torch.tensor([len(path) for path in paths])
    path = torch.zeros(3, 40, dtype=torch.long)
    for request, nodes in enumerate(paths):
        path[request, : len(nodes)] = torch.tensor(nodes)
    once, steps = states.clone(), states.clone()
    commit_delta_rule(rows, once, slots, path, count)
    for place in range(int(count.max())):
        commit_delta_rule(rows, steps, slots, path[:, place:].contiguous(), (count - place).clamp(0, 1))
    assert torch.equal(once, steps)
    assert torch.equal(once[:, [0, 2, 4]], states[:, [0, 2, 4]])  # padding's, and those of no request
    for layer, drawn_rows in enumerate((x, other)):
        one = drawn_rows._replace(slots=slots, states=states[layer])
        for request in (0, 2):
            for head in range(2):
                expected = torch.from_numpy(state_after(one, request, head, paths[request]))
                assert torch.allclose(once[layer, slots[request], head].double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("exact", [False, True])
def test_chunks_equal_loops_and_advance_their_states(exact: bool) -> None:
    """Three prompts, one longer than a piece, one of them padding."""
    lengths = (130, 1, 70)
    x = drawn(17, sum(lengths), batch=1, chain=1.0, most_depth=999, gate=2.0)
    slots = torch.tensor([2, 1, 0])
    chunks = ChunkMask(lengths, torch.tensor([0, 130, 131, 201]))
    states = x.states.clone()
    found = chunk_delta_rule(x.q, x.rows, states, slots, chunks, exact=exact)
    assert torch.equal(states[0], x.states[0])
    for request, span in enumerate(chunks.spans()):
        one = Drawn(
            x.q[:, span], part(x.rows, slice(None), span), x.states, slots[request : request + 1], x.mask,
            [[*range(-1, lengths[request] - 1)]],
        )  # fmt: skip
        assert off(found[:, span], outputs(one), one) < 1e-5
        for head in range(2 if slots[request] else 0):
            expected = torch.from_numpy(state_after(one, 0, head, [*range(lengths[request])]))
            assert torch.allclose(states[slots[request], head].double(), expected, rtol=1e-5, atol=2e-5)


def test_exact_chunks_are_the_same_bits_wherever_they_are_cut() -> None:
    x = drawn(19, 90, batch=1, chain=1.0, most_depth=999, gate=2.0)
    whole, parts = x.states.clone(), x.states.clone()
    slots = x.slots
    expected = chunk_delta_rule(x.q, x.rows, whole, slots, ChunkMask((90,), torch.tensor([0, 90])), exact=True)
    for span in (slice(0, 7), slice(7, 71), slice(71, 90)):
        chunk = ChunkMask((span.stop - span.start,), torch.tensor([0, span.stop - span.start]))
        some = part(x.rows, slice(None), span)
        assert torch.equal(chunk_delta_rule(x.q[:, span], some, parts, slots, chunk, exact=True), expected[:, span])
    assert torch.equal(whole, parts)


def test_a_chain_equals_transformers() -> None:
    model = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    x = drawn(23, 12, chain=1.0, gate=1.0, heads=(2, 4))
    q, k = (y.repeat_interleave(2, 2) for y in (x.q, x.rows.k))
    states = x.states[x.slots]
    expected, _ = model.torch_recurrent_gated_delta_rule(
        q, k, x.rows.v, x.rows.g, x.rows.beta, states, False, use_qk_l2norm_in_kernel=True
    )
    assert torch.allclose(tree_delta_rule(*x[:5]), expected, rtol=1e-5, atol=1e-5)


def test_threads_do_not_change_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    x = drawn(29, 60, batch=3, chain=0.5, heads=(2, 4))
    alone = tree_delta_rule(*x[:5], exact=True)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert torch.equal(tree_delta_rule(*x[:5], exact=True), alone)
