"""The GPU suite gives peers what the op's specification means, and counts what is there."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from benchmarks.gpu import peers
from benchmarks.gpu.call import RELATIVE, Call, Wrong, compare, make_call, reference, trees
from benchmarks.gpu.flashinfer_peer import longer_pages
from benchmarks.gpu.shapes import SHORT, Shape, checked, flexed, timed
from benchmarks.gpu.writes import WRITES, make_write
from d2sd.plugins.kv_pages import write_pages

RAGGED = Shape((37, 0, 16), 5, heads=6, kv_heads=2, size=16, kind="fp32")


def everything(call: Call) -> Tensor:
    return torch.cat([reference(call, request) for request in range(len(call.q))])


def by_sdpa(call: Call) -> Tensor:
    keys, values = peers.cleaned(call)
    return peers.unpacked(peers.sdpa(call, keys, values, peers.bias(call), SDPBackend.MATH)(), call)


def by_flex(call: Call) -> Tensor:
    return peers.flex(call, *peers.cleaned(call))().transpose(1, 2)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("peer", [by_sdpa, by_flex])
@pytest.mark.parametrize("fp8", [False, True])
def test_peers_compute_what_the_op_says(peer: object, fp8: bool) -> None:
    """Lengths differ, one is 0, slots of nobody hold NaN, every request has its own tree."""
    call = make_call(replace(RAGGED, fp8=fp8), "cpu")
    assert callable(peer)
    torch.testing.assert_close(peer(call), everything(call), rtol=1e-4, atol=1e-5)


def test_the_lower_reference_sees_all() -> None:
    call = make_call(replace(RAGGED, contexts=(32, 32)), "cpu")
    found = peers.unpacked(peers.sdpa(call, *peers.cleaned(call), None, SDPBackend.MATH)(), call)
    compare(found, call, torch.ones_like(call.attn_mask))
    with pytest.raises(Wrong, match="past the bounds"):
        compare(found, call)


def test_flashinfers_pages_hold_context_and_rows() -> None:
    call = make_call(replace(RAGGED, contexts=(32, 32), rows=17), "cpu")
    (keys, values), ends, ids = longer_pages(call)
    assert ends.tolist() == [0, 4, 8]
    for pool, new, expected in ((keys, call.k, peers.gather(call)[0]), (values, call.v, peers.gather(call)[1])):
        held = pool[ids.view(2, 4)].flatten(1, 2)[:, : 32 + new.shape[1]]
        assert torch.equal(held, expected.transpose(1, 2))


def test_bounds_notice_a_result_of_zeros() -> None:
    """Over a long context it is within the budget of the kernels' tests, being small itself."""
    call = make_call(Shape((1 << 16,), 2, heads=2, kv_heads=1, size=16, kind="bf16"), "cpu")
    with pytest.raises(Wrong, match="'error_of_budget': 0"):
        compare(torch.zeros_like(call.q), call)
    assert set(RELATIVE) == {torch.float32, torch.float16, torch.bfloat16}
    with pytest.raises(Wrong, match="not finite"):
        compare(torch.full_like(call.q, torch.nan), call)


def test_trees() -> None:
    attn_mask = trees(3, 40, seed=1)
    assert attn_mask.diagonal(dim1=1, dim2=2).all()
    assert not attn_mask.triu(1).any()
    assert (attn_mask.float() @ attn_mask.float() > 0).eq(attn_mask).all()  # an ancestor's ancestors are ancestors
    assert attn_mask[:, 1:].sum(2).ge(2).all()  # everybody hangs behind the root
    assert not torch.equal(attn_mask[0], attn_mask[1])
    assert not attn_mask.all(dim=0).tril().equal(torch.ones(40, 40).tril().bool())  # no chain


@pytest.mark.parametrize("fp8", [False, True])
def test_bytes_are_those_of_the_tokens_there(fp8: bool) -> None:
    shape = replace(RAGGED, kind="bf16", fp8=fp8)
    call = make_call(shape, "cpu")
    held = sum(int((~pages.isnan()).sum()) * pages.itemsize for pages in (call.context.k_pages, call.context.v_pages))
    assert shape.bytes_read() == held + call.k.nbytes + call.v.nbytes
    # by hand: 32 requests of 8192 tokens and 64 rows, 8 heads of 128 numbers in two bytes, keys and values
    assert Shape((8192,) * 32, 64).bytes_read() == 32 * (8192 + 64) * 8 * 128 * 2 * 2
    assert Shape((8192,) * 32, 64, fp8=True).bytes_read() == 32 * (8192 * 1 + 64 * 2) * 8 * 128 * 2


@pytest.mark.parametrize("fp8", [False, True])
def test_bytes_of_a_write_are_those_of_kept_rows(fp8: bool) -> None:
    write = replace(WRITES[3], layers=2, fp8=fp8)
    arguments = make_write(write, "cpu")
    before = {name: arguments[name].clone() for name in ("k_pages", "v_pages")}
    write_pages(**arguments)
    moved = 0
    for name, pages in before.items():
        differ = (arguments[name].view(torch.uint8) != pages.view(torch.uint8))[:, 1:].flatten(3).any(3)
        moved += int(differ.sum()) * 8 * 128 * (2 + pages.itemsize)
    assert 0 < int(arguments["keep"].sum()) < arguments["keep"].numel()
    assert write.bytes_moved(int(arguments["keep"].sum())) == moved


def test_shapes_are_what_was_asked_for_and_named_apart() -> None:
    every = [*timed(), *flexed()]
    for shape in every:  # SDPA's fast paths ask for it, and FlashAttention without a mask for full pages
        assert (shape.slots + shape.rows) % 8 == 0 or shape.rows == 1
        assert shape.slots == min(shape.contexts)
    assert len({shape.name for shape in timed()}) == 45
    assert len({shape.name for shape in checked()}) == len(list(checked()))
    qwen = {(s.contexts[0], len(s.contexts), s.rows) for s in timed() if s.size == 128 and not s.fp8 and s not in SHORT}
    assert qwen == {(c, b, r) for c in (1024, 8192, 32768) for b in (1, 8, 32) for r in (16, 64, 160)}
