"""The paged write against loops over layers, requests and places; FP8 pages against the model's emulation of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from d2sd.modeling.fp8 import Fp8Cache
from d2sd.plugins.cascade_attention import pack_mask_bits
from d2sd.plugins.cpu import library
from d2sd.plugins.kv_pages import write_pages
from d2sd.plugins.kv_pages.cpu import supported
from d2sd.plugins.shared.fp8 import from_pages, to_pages
from tests.tiny import bare_pool

# Two layers, two requests of three pages of 4; places interleave. The second request's last place is past its table.
TABLE = torch.tensor([[3, 1, 6], [2, 4, 5]])
POSITIONS = torch.tensor([[2, 1, 9, 8], [3, 0, 11, 12]])
KEEP = torch.tensor([[True, True, True, False], [True, True, True, True]])
PATH = torch.tensor([[0, 2, 5, 5], [1, 4, 3, 0]])
SCALES = torch.tensor([0.011, 0.02]), torch.tensor([0.007, 0.03])


def rows(count: int) -> tuple[Tensor, Tensor]:
    """[L, B, count, Hkv, D]."""
    draw = torch.Generator().manual_seed(1)
    return torch.randn(2, 2, count, 3, 8, generator=draw), torch.randn(2, 2, count, 3, 8, generator=draw)


def looped(new: Tensor, pages: Tensor, path: Tensor | None, scales: Tensor | None) -> Tensor:
    for layer in range(2):
        for request in range(2):
            for place, (position, keep) in enumerate(
                zip(POSITIONS[request].tolist(), KEEP[request].tolist(), strict=True)
            ):
                if keep and position < 12:
                    row = new[layer, request, place if path is None else int(path[request, place])]
                    stored = row if scales is None else to_pages(row, scales[layer])
                    pages[layer, int(TABLE[request, position // 4]), position % 4] = stored.float()
    return pages


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("scales", [None, SCALES])
@pytest.mark.parametrize("path", [None, PATH])
def test_rows_go_where_loops_put_them(
    path: Tensor | None, scales: tuple[Tensor, Tensor] | None, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr("d2sd.plugins.cpu.library.available", lambda: False)
    k, v = rows(4 if path is None else 6)
    blank = torch.full((2, 7, 4, 3, 8), 7.0)
    stored = torch.float32 if scales is None else torch.float8_e4m3fn
    k_pages, v_pages = blank.to(stored, copy=True), blank.to(stored, copy=True)
    write_pages(k, v, k_pages, v_pages, TABLE, POSITIONS, KEEP, path, *(scales or ()))
    k_scale, v_scale = scales or (None, None)
    assert torch.equal(k_pages.float()[:, 1:], looped(k, blank.clone(), path, k_scale)[:, 1:])
    assert torch.equal(v_pages.float()[:, 1:], looped(v, blank.clone(), path, v_scale)[:, 1:])


@pytest.mark.skipif(not library.available(), reason=f"no CPU kernels: {library.load()}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_any_strides_are_copied(dtype: torch.dtype) -> None:
    """A drafter's context has such strides: layers and keys and values are between the tokens."""
    wide = torch.randn(2, 4, 2, 2, 3, 8, generator=torch.Generator().manual_seed(2)).to(dtype)
    k, v = wide.movedim(3, 0).unbind(3)
    assert supported(k, v, wide)
    assert not supported(k.transpose(3, 4), v, wide)
    assert not supported(k.double(), v, wide)
    found, expected = torch.zeros(2, 2, 2, 7, 4, 3, 8, dtype=dtype).unbind()
    write_pages(k, v, found[0], found[1], TABLE, POSITIONS, KEEP)
    write_pages.reference(k, v, expected[0], expected[1], TABLE, POSITIONS, KEEP)
    assert torch.equal(found[:, :, 1:], expected[:, :, 1:])


def test_a_pool_commits_a_path() -> None:
    """A caller may as well gather the rows of the path itself, side by side."""
    k, v = rows(6)
    pools = [bare_pool(2, 7, 4, 3, 8) for _ in "ab"]
    pools[0].write(k, v, (TABLE,), POSITIONS, KEEP, PATH)
    of = torch.arange(2)[:, None]
    pools[1].write(k[:, of, PATH], v[:, of, PATH], (TABLE,), POSITIONS, KEEP)
    assert torch.equal(pools[0].k, pools[1].k)
    assert torch.equal(pools[0].v, pools[1].v)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [0.011, 0.25, 3e-5])
def test_fp8_pages_keep_what_the_models_cache_rounds(dtype: torch.dtype, scale: float) -> None:
    """A row that `Fp8Cache` has rounded, written and read again, is the same bits."""
    cache = Fp8Cache()
    cache.scale = torch.tensor(scale)
    x = torch.randn(4096, generator=torch.Generator().manual_seed(1)) * 200 * scale
    rounded = cache(x.to(dtype))
    assert rounded.dtype == dtype
    assert torch.equal(from_pages(to_pages(rounded, cache.scale), cache.scale, dtype), rounded)


@pytest.mark.parametrize("rows", [1, 31, 32, 33, 64, 70])
def test_every_bit_is_its_pair(rows: int) -> None:
    attn_mask = torch.rand(2, rows, rows, generator=torch.Generator().manual_seed(rows)) < 0.5
    words = pack_mask_bits(attn_mask)
    assert words.dtype == torch.int32
    assert words.shape == (2, rows, -(-rows // 32))
    for request in range(2):
        for row in range(rows):
            bits = sum((word % 2**32) << 32 * place for place, word in enumerate(words[request, row].tolist()))
            assert bits == sum(int(seen) << column for column, seen in enumerate(attn_mask[request, row].tolist()))


def test_expanded_masks_pack_too() -> None:
    """A chain's mask is one [T, T] expanded over the batch."""
    chain = torch.ones(3, 3, dtype=torch.bool).tril()
    assert pack_mask_bits(chain.expand(2, 3, 3)).tolist() == 2 * [[[1], [3], [7]]]
