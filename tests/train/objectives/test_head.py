"""The statistics of the logits: by hand, by finite differences, and the fused twin against the eager one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from d2sd.train.objectives import head as module
from d2sd.train.objectives.head import Added, Head, HeadStats, Rows, head_stats, head_stats_fused

# Shape letters: N rows, C candidate ids, E hidden.

Twin = Callable[[Rows], HeadStats]
TWINS = pytest.mark.parametrize("twin", [head_stats, head_stats_fused], ids=["eager", "fused"])
WITH_GRADIENT = ("log_q", "cross", "overlap")


class Case(NamedTuple):
    """The rows of a twin, without what is added."""

    hidden: Tensor
    target_hidden: Tensor
    labels: Tensor
    head: Head
    forbidden: Tensor | None

    def run(self, twin: Twin, upstream: Tensor) -> tuple[HeadStats, Tensor]:
        """Statistics, and the gradient at `hidden` of their sum under random weights `upstream [3, N]`."""
        hidden = self.hidden.clone().requires_grad_()
        stats = twin(Rows(hidden, *self[1:]))
        parts = [(getattr(stats, name) * row).sum() for name, row in zip(WITH_GRADIENT, upstream, strict=True)]
        (gradient,) = torch.autograd.grad(torch.stack(parts).sum(), hidden)
        return HeadStats(*(column.detach() for column in stats)), gradient


def case(rows: int, ids: int, width: int, size: float, dtype: torch.dtype, *, forbidden: bool = True) -> Case:
    """Random rows with logits of about `size`. The last third of the ids are raised, as sampled ones are; the drafter
    repeats the target in row 0; every other row forbids an id: sometimes the likeliest of either, never the label.
    """
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(ids, width, generator=draw).to(dtype)
    hidden, target_hidden = (torch.randn(2, rows, width, generator=draw) * size * width**-0.5).to(dtype)
    hidden[0] = target_hidden[0]
    correction = torch.zeros(ids)
    correction[-(ids // 3) :] = 1.7
    head = Head(weight, correction)
    labels = torch.randint(ids, (rows,), generator=draw)
    labels[::3] = head.logits(target_hidden[::3], None).argmax(-1)  # greedy answers, mostly
    if not forbidden:
        return Case(hidden, target_hidden, labels, head, None)
    banned = torch.randint(ids, (rows,), generator=draw)
    for start, likeliest in ((1, hidden), (3, target_hidden)):
        banned[start::8] = head.logits(likeliest[start::8], None).argmax(-1)
    banned[::2] = -1
    return Case(hidden, target_hidden, labels, head, torch.where(banned == labels, -1, banned))


def upstream_of(rows: int) -> Tensor:
    return torch.randn(3, rows, generator=torch.Generator().manual_seed(1))


# --- Against formulas written out ------------------------------------------------------------------------------------


def softmax(logits: list[float], banned: int) -> list[float]:
    top = max(logits)
    powers = [0.0 if i == banned else math.exp(z - top) for i, z in enumerate(logits)]
    return [power / sum(powers) for power in powers]


def by_hand(hidden: list[float], target_hidden: list[float], label: int, head: Head, banned: int) -> dict[str, float]:
    """One row, in Python's own floats."""
    corrections: list[float] = head.correction.double().tolist()
    weight: list[list[float]] = head.weight.double().tolist()

    def logits(row: list[float]) -> list[float]:
        return [sum(a * b for a, b in zip(row, w, strict=True)) + c for w, c in zip(weight, corrections, strict=True)]

    z = logits(hidden)
    q, p = softmax(z, banned), softmax(logits(target_hidden), banned)
    allowed = [i for i in range(len(z)) if i != banned]
    return {
        "log_q": math.log(q[label]),
        "cross": -sum(p[i] * math.log(q[i]) for i in allowed),
        "overlap": sum(min(p[i], q[i]) for i in allowed),
        "entropy": -sum(p[i] * math.log(p[i]) for i in allowed),
        "guess": max(allowed, key=lambda i: z[i] - corrections[i]),
    }


@TWINS
def test_values_equal_the_formulas(twin: Twin) -> None:
    given = case(16, 9, 5, 2.0, torch.float32)
    assert given.forbidden is not None
    stats = twin(Rows(*given))
    assert stats.guess.dtype == torch.int64
    for row in range(16):
        expected = by_hand(
            given.hidden[row].double().tolist(),
            given.target_hidden[row].double().tolist(),
            int(given.labels[row]),
            given.head,
            int(given.forbidden[row]),
        )
        for name, value in expected.items():
            assert float(getattr(stats, name)[row]) == pytest.approx(value, rel=1e-5, abs=1e-6), (row, name)
    raised = given.head.logits(given.hidden, given.forbidden).argmax(-1)
    assert (stats.guess != raised).any(), "a raised logit must not decide the guess"


@TWINS
def test_gradients_equal_central_differences(twin: Twin) -> None:
    """The differences are of the formulas in double precision, by coordinate, in rows apart from the kink at p = q."""
    given, upstream = case(12, 9, 5, 2.0, torch.float32), upstream_of(12)
    assert given.forbidden is not None
    _, gradient = given.run(twin, upstream)
    for row in range(1, 12):  # the drafter of row 0 is the target
        start: list[float] = given.hidden[row].double().tolist()

        def total(moved: list[float], row: int = row) -> float:
            assert given.forbidden is not None
            found = by_hand(
                moved,
                given.target_hidden[row].double().tolist(),
                int(given.labels[row]),
                given.head,
                int(given.forbidden[row]),
            )
            return sum(float(upstream[i, row]) * found[name] for i, name in enumerate(WITH_GRADIENT))

        for place in range(5):
            ends = []
            for step in (1e-5, -1e-5):
                moved = list(start)
                moved[place] += step
                ends.append(total(moved))
            numeric = (ends[0] - ends[1]) / 2e-5
            assert float(gradient[row, place]) == pytest.approx(numeric, rel=1e-4, abs=1e-5)


# --- The fused twin against the eager one ----------------------------------------------------------------------------

#: rows, ids, hidden, size of the logits, dtype; rows of a chunk; then what the twins may differ by, absolute in the
#: values and relative to the largest in the gradient.
#: plain, vocabulary: rounding of fp32 products of other shapes, about eps × |logit|, some eps = 1.2e-7 added up.
#: saturated: the same with logits up to 1500, whose last place is 1.2e-4.
#: bf16: products are exact in fp32 sums, so values agree as above; dz is rounded to bf16 in both twins, but may fall on
#: either side of a boundary: 2^-8 of the largest.
REGIMES = {
    "plain": (37, 50, 16, 3.0, torch.float32, 8, 1e-5, 1e-5),
    "saturated": (37, 50, 16, 400.0, torch.float32, 8, 1e-3, 1e-4),
    "bf16": (37, 50, 16, 3.0, torch.bfloat16, 8, 1e-5, 2**-8),
    "vocabulary": (29, 49_152, 8, 3.0, torch.float32, 8, 1e-4, 1e-5),
    "vocabulary, bf16": (29, 49_152 + 331, 8, 3.0, torch.bfloat16, 8, 1e-4, 2**-8),
}


@pytest.mark.parametrize("forbidden", [True, False], ids=["forbidden", "free"])
@pytest.mark.parametrize("regime", REGIMES)
def test_twins_agree(regime: str, forbidden: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every regime ends in a chunk of five rows."""
    rows, ids, width, size, dtype, chunk, of_values, of_gradient = REGIMES[regime]
    monkeypatch.setattr(module, "_CHUNK", chunk * ids)
    assert [len(range(rows)[part]) for part in module._chunks(rows, ids)] == [8] * (rows // 8) + [5]
    given, upstream = case(rows, ids, width, size, dtype, forbidden=forbidden), upstream_of(rows)
    eager, wanted = given.run(head_stats, upstream)
    fused, found = given.run(head_stats_fused, upstream)
    for name, expected, value in zip(HeadStats._fields, eager, fused, strict=True):
        assert value.dtype == expected.dtype
        assert torch.isfinite(value).all(), name
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=of_values, msg=lambda text: f"{name}: {text}")  # noqa: B023
    assert found.dtype == dtype
    assert torch.isfinite(found).all()
    largest = float(wanted.float().abs().max())
    assert largest > 0.1
    torch.testing.assert_close(found.float(), wanted.float(), rtol=0, atol=of_gradient * largest)
    if regime == "saturated":
        assert float(eager.log_q.min()) < -100, "a wrong certainty is among the rows"
        assert float(eager.overlap.min()) < 1e-6


@TWINS
def test_a_drafter_that_is_the_target_has_nothing_to_learn(twin: Twin) -> None:
    """At p = q the kink's derivative is shared; overlap is one, and no term but the label's pulls."""
    given = case(1, 9, 5, 2.0, torch.float32)
    upstream = torch.tensor([[0.0], [1.0], [1.0]])
    stats, gradient = given.run(twin, upstream)
    assert float(stats.overlap) == pytest.approx(1)
    assert float(stats.cross) == pytest.approx(float(stats.entropy))
    assert float(gradient.abs().max()) < 1e-6


@TWINS
def test_where_target_and_drafter_agree_the_overlaps_derivative_is_shared(twin: Twin) -> None:
    """Target and drafter differ by an exchange of ids 0 and 1, so ids 2 and 3 are exactly as likely to both."""
    head = Head(torch.eye(4), torch.zeros(4))
    hidden, target_hidden = torch.tensor([[2.0, 1.0, 0.0, -1.0]]), torch.tensor([[1.0, 2.0, 0.0, -1.0]])
    given = Case(hidden, target_hidden, torch.tensor([0]), head, None)
    _, gradient = given.run(twin, torch.tensor([[0.0], [0.0], [1.0]]))
    q = hidden.softmax(-1)
    below = torch.tensor([[0.0, 1.0, 0.5, 0.5]])
    torch.testing.assert_close(gradient, q * (below - (q * below).sum()))


@TWINS
def test_no_rows_are_no_error(twin: Twin) -> None:
    """A step whose blocks all end within what is visible, as short answers can give."""
    given = case(4, 9, 5, 2.0, torch.float32)
    none = Case(given.hidden[:0], given.target_hidden[:0], given.labels[:0], given.head, given.labels[:0])
    stats, gradient = none.run(twin, torch.zeros(3, 0))
    assert all(column.shape == (0,) for column in stats)
    assert gradient.shape == (0, 5)


# --- Memory ----------------------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most numbers in one tensor that any operation gave."""

    found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.found = max(self.found, out.numel())
        return out


def kept_and_made(twin: Twin, given: Case) -> tuple[int, int]:
    """Numbers in the largest tensor kept for the backward pass, and in the largest one either pass made."""
    kept = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    made = Largest()  # type: ignore[no-untyped-call]
    with made, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        given.run(twin, upstream_of(len(given.labels)))
    return max(kept), made.found


def test_the_fused_twin_never_holds_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, ids, width, chunk = 64, 200, 4, 8
    monkeypatch.setattr(module, "_CHUNK", chunk * ids)
    given = case(rows, ids, width, 3.0, torch.float32)
    kept, made = kept_and_made(head_stats, given)
    assert kept >= rows * ids
    assert made >= rows * ids
    kept, made = kept_and_made(head_stats_fused, given)
    assert kept <= rows * width
    assert made <= chunk * ids


# --- A draft ---------------------------------------------------------------------------------------------------------


def test_best_is_the_heads_own_argmax() -> None:
    """Raised logits stand for many ids, and none of them is that likely itself."""
    head = Head(torch.eye(3), torch.tensor([0.0, 0.0, 5.0]))
    hidden = torch.tensor([[3.0, 1.0, 2.0], [1.0, 2.0, 3.0]])
    assert head.best(hidden).tolist() == [0, 2]
    assert head.logits(hidden, None).argmax(-1).tolist() == [2, 2]


def test_products_stay_in_the_heads_precision_under_autocast() -> None:
    given = case(4, 9, 5, 2.0, torch.float32)
    plain = given.head.logits(given.hidden, None)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(given.head.logits(given.hidden, None), plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_added_learns_alike_in_both(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexDraft's calibration: values, and gradients at its three parts and at the hidden states; in several chunks."""
    monkeypatch.setattr(module, "_CHUNK", 4 * 31)
    made = case(13, 31, 8, 2.0, dtype)
    draw = torch.Generator().manual_seed(5)
    parts = [torch.randn(shape, generator=draw) for shape in ((13, 6), (31, 6), (31,))]
    upstream = torch.randn(3, 13, generator=draw)

    def run(twin: Any) -> tuple[HeadStats, list[Tensor]]:
        leaves = [made.hidden.float().requires_grad_(), *(part.clone().requires_grad_() for part in parts)]
        stats = twin(Rows(leaves[0], *made[1:], Added(*leaves[1:])))
        total = sum((getattr(stats, name) * row).sum() for name, row in zip(WITH_GRADIENT, upstream, strict=True))
        return stats, list(torch.autograd.grad(total, leaves))

    (eager, wanted), (fused, found) = run(head_stats), run(head_stats_fused)
    plain = head_stats(Rows(made.hidden.float(), *made[1:]))
    assert (eager.log_q - plain.log_q).abs().max() > 0.1
    assert torch.equal(eager.entropy, plain.entropy), "the target's distribution is its own"
    for one, other in zip(eager, fused, strict=True):
        torch.testing.assert_close(one.detach(), other.detach())
    close = {} if dtype == torch.float32 else {"atol": 0.15, "rtol": 0.1}
    for one, other in zip(wanted, found, strict=True):
        assert one.abs().max() > 0.1
        torch.testing.assert_close(one, other, **close)  # type: ignore[arg-type]
