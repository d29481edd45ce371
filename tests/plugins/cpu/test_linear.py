"""Products with packed weights: their values, and that a row's bits do not depend on the rows beside it."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from d2sd.plugins.cpu import library
from d2sd.plugins.cpu.library import PackedLinear

pytestmark = pytest.mark.skipif(not library.available(), reason=f"no CPU kernels: {library.load()}")

TYPES = [torch.float32, torch.bfloat16, torch.float16]
#: Outputs and inputs: whole panels and parts of one, odd depths, more rows of weights than threads and fewer.
SHAPES = [(64, 32), (40, 24), (7, 5), (33, 31), (320, 576)]


def by_loops(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """One number at a time, in fp64."""
    rows, columns = x.double().tolist(), weight.double().tolist()
    added = [0.0] * len(columns) if bias is None else bias.double().tolist()
    return torch.tensor(
        [[sum(map(float.__mul__, row, column)) + b for column, b in zip(columns, added, strict=True)] for row in rows]
    )


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_products_are_right(shape: tuple[int, int], dtype: torch.dtype, bias: bool) -> None:
    plain = torch.nn.Linear(shape[1], shape[0], bias=bias).to(dtype)
    x = torch.randn(5, shape[1]).to(dtype)
    expected = by_loops(x, plain.weight, plain.bias)
    found = PackedLinear.of(plain.weight, plain.bias)(x)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected.double(), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("depth", [200, 192], ids=["inputs left over", "whole tiles of AMX"])
def test_bits_of_a_row_do_not_depend_on_other_rows(
    depth: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    product = PackedLinear.of(torch.randn(72, depth).to(dtype))
    x = torch.randn(200, depth)
    alone = torch.cat([product(row[None]) for row in x])
    for threads in (1, 2, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        for count in (2, 3, 11, 12, 13, 16, 17, 24, 25, 32, 33, 95, 96, 97, 100, 200):
            assert torch.equal(product(x[:count]), alone[:count]), (threads, count)
            assert torch.equal(product(x[-count:]), alone[-count:]), (threads, count)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_computes_on_its_one_thread() -> None:
    """A child would wait forever for the threads that OpenMP had in its parent."""
    product, x, threads = PackedLinear.of(torch.randn(72, 40)), torch.randn(3, 40), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        expected = product(x)
        child = os.fork()
        if not child:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(10)
            os._exit(0 if torch.equal(product(x), expected) else 1)
        assert os.waitpid(child, 0)[1] == 0
    finally:
        torch.set_num_threads(threads)


def test_rows_may_be_none_and_of_any_rank() -> None:
    product = PackedLinear.of(torch.randn(6, 4))
    assert product(torch.zeros(2, 0, 4)).shape == (2, 0, 6)
    x = torch.randn(2, 3, 4)
    assert torch.equal(product(x)[1, 2], product(x[1, 2]))


def test_rows_of_another_width_are_an_error() -> None:
    with pytest.raises(AssertionError):
        PackedLinear.of(torch.randn(6, 4))(torch.zeros(2, 5))
