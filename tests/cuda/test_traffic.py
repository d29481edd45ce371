"""Bytes, operations and nodes of decode steps at Qwen3-8B's geometry: the counter's rules, and bounds of a step."""

from __future__ import annotations

import ast
import inspect
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the extra triton is not installed")
from triton.runtime.jit import JITFunction  # type: ignore[import-untyped]

from benchmarks.gpu import traffic
from benchmarks.gpu.roofline import floor_bytes, passes
from benchmarks.gpu.steps import BATCHES, BODY, CONTEXT, FILTERED, SAMPLED, VOCABULARY, Step, count, rows
from benchmarks.gpu.traffic import KV, LOGITS, WEIGHTS, Launch, Meter, read, without_gpu, written
from d2sd.modeling.product_forms import Weights, forms
from tests.plugins.cases import kernels

ROOT = Path(__file__).parents[2]


def fp32(*shape: int) -> Tensor:
    return torch.zeros(shape, device="meta")


def whole_numbers(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.long, device="meta")


#: Bytes read, bytes written, operations.
RULES: dict[str, tuple[Callable[[], object], tuple[int, int, int]]] = {
    "a sum reads both": (lambda: fp32(3, 5) + fp32(5), (60 + 20, 60, 0)),
    "broadcast axes are read once": (lambda: fp32(1, 5).expand(3, 5) + fp32(3, 5), (20 + 60, 60, 0)),
    "views are free": (lambda: fp32(3, 5)[1:].t().unsqueeze(0).movedim(0, 1), (0, 0, 0)),
    "a reshape that copies is not": (lambda: fp32(3, 5)[1:].t().flatten(), (40, 40, 0)),
    "in place": (lambda: fp32(4).add_(fp32(4)), (32, 16, 0)),
    "a copy does not read its target": (lambda: fp32(4).copy_(fp32(4)), (16, 16, 0)),
    "rows of a table": (lambda: fp32(100, 4)[whole_numbers(3)], (48 + 24, 48, 0)),
    "gather": (lambda: fp32(9, 4).gather(1, whole_numbers(2, 2)), (16 + 32, 16, 0)),
    "rows put into a table": (lambda: put(fp32(100), whole_numbers(3), fp32(3)), (24 + 12, 12, 0)),
    "product": (lambda: torch.nn.functional.linear(fp32(2, 8), fp32(5, 8)), (64 + 160, 40, 160)),
    "products": (lambda: torch.bmm(fp32(8).expand(3, 2, 8), fp32(3, 8, 5)), (32 + 480, 120, 480)),
}


def put(table: Tensor, index: Tensor, values: Tensor) -> None:
    table[index] = values


@pytest.mark.parametrize("name", RULES)
@torch.inference_mode()
def test_operators(name: str) -> None:
    run, expected = RULES[name]
    with (meter := Meter(0, ())):
        run()
    made = [launch for launch in meter.launches if launch.name != "aten.zeros"]
    assert (read(made), written(made), sum(launch.flops for launch in made)) == expected


def stored(kernel: Any) -> set[str]:
    """Pointers that a kernel's stores begin with; of a pointer of its own, the argument that it begins with."""
    tree = ast.parse(inspect.getsource(kernel.fn))

    def leftmost(node: ast.expr) -> str:
        while isinstance(node, ast.BinOp | ast.Subscript):
            node = node.left if isinstance(node, ast.BinOp) else node.value
        return node.id if isinstance(node, ast.Name) else ""

    own = {
        target.id: leftmost(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    called = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    stores = {"tl.store", "tl.atomic_add"}
    bases = {leftmost(node.args[0]) for node in called if ast.unparse(node.func) in stores}
    for node in called:  # what a function that it calls stores
        helper = kernel.fn.__globals__.get(ast.unparse(node.func))
        if isinstance(helper, JITFunction) and (written := stored(helper)):
            given = zip(helper.arg_names, node.args, strict=False)
            bases |= {leftmost(argument) for name, argument in given if name in written}
    while not bases <= set(kernel.arg_names):
        bases = {base if base in kernel.arg_names else own[base] for base in bases}
    return bases


@pytest.mark.parametrize("name", kernels())
def test_what_a_kernel_writes_is_what_it_stores(name: str) -> None:
    registered = kernels()[name]
    assert stored(registered.kernel) == set(registered.writes)


@torch.inference_mode()
def test_an_fp8_product_of_few_rows_is_one_launch() -> None:
    """Weights are read once, as by PyTorch's product; the sums of the four shares are written and read back."""
    x, values = (torch.empty(rows, 4096, dtype=torch.float8_e4m3fn, device="meta") for rows in (16, 4096))
    one, arrived = fp32(), torch.zeros(32, dtype=torch.int32, device="meta")
    weights = Weights(values, torch.bfloat16, scales=(one, one), arrived=arrived)
    (form,) = (form for form in forms(16, weights, (9, 0)) if form.name == "split kernel")
    with (meter := Meter(0, ())), without_gpu(meter):
        form.call(x, weights)
    (launch,) = meter.launches
    partial, counters = 4 * 16 * 4096 * 4, 32 * 4
    assert launch.name == "linear_kernel"
    assert read([launch]) == x.nbytes + values.nbytes + 2 * 4 + partial + counters
    assert written([launch]) == 16 * 4096 * 2 + partial + counters
    assert launch.flops == 2 * 16 * 4096 * 4096


def test_a_kernel_without_a_rule_is_an_error() -> None:
    with pytest.raises(KeyError, match="says which arguments"):
        traffic.kernel_bytes("new_kernel", {}, 0)


# -- a step ------------------------------------------------------------------------------------------------------------

FP8 = pytest.param("fp8", marks=pytest.mark.slow)
#: Bytes read over the floor's. In FP8 the floor is half as large.
#: Attention's partial results are 0.0098 and 0.0166 of it, of eight splits. With four they are half, and the bounds
#: would be 1.025 and 1.037; but a layer then takes 9.7 µs in place of 7.7 (docs/kernel-times.md), by latencies that
#: bytes do not show: the launch reads them back from the L2 cache.
READS = {"bf16": 1.030, "fp8": 1.045}
NODES = {"bf16": 438, "fp8": 440}


@pytest.fixture(params=["bf16", FP8], scope="module")
def kind(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def step(kind: str) -> list[Launch]:
    """D2SD, one request, the whole vocabulary."""
    return count(Step("d2sd", kind))


def test_every_weight_is_read_once(step: list[Launch], kind: str) -> None:
    """But the head by each of three passes, the embedding in part."""
    times: dict[int, float] = {}
    for launch in step:
        for access in launch.reads:
            if access.role == WEIGHTS and access.size > 1e6:
                times[access.storage] = times.get(access.storage, 0) + access.bytes / access.size
    tables, once = [1e-3, 3.0], 36 * 4 + 2 * (5 * 3 + 1 + 1)
    found = sorted(times.values())
    assert found[0] < tables[0]
    assert found[1:] == pytest.approx([1.0] * once + tables[1:])


def test_the_floor_is_the_formulas(step: list[Launch], kind: str) -> None:
    """Weights, K/V and operations from the geometry alone."""
    size, e, v = 1 if kind == "fp8" else 2, BODY.hidden_size, VOCABULARY
    layer = e * 6144 + e * 4096 + 3 * e * 12288
    draft, verify = 2 * v * e + 5 * size * (layer + e * e), 36 * size * layer + 2 * v * e
    token = 2 * 8 * 128 * 2  # bytes of K/V of one layer
    weights, context = 2 * draft + verify, CONTEXT * token * (36 + 2 * 5)
    small = 5e6  # norms, scales, rows of the embedding
    assert weights + context <= floor_bytes(step) <= weights + context + small
    assert read(step, KV) == context

    def attended(count: int, layers: int) -> int:
        return 4 * count * 4096 * layers * (CONTEXT + count)

    injected = 2 * 16 * (5 * e * e + 5 * e * 6144)  # `fc`, and the qkv products of as many rows
    expected = {
        "draft_first": 2 * (16 * 5 * layer + 15 * v * e) + attended(16, 5) + injected,
        "draft_second": 2 * (64 * 5 * layer + 60 * v * e) + attended(64, 5) + injected,
        "verify": 2 * 64 * (36 * layer + v * e) + attended(64, 36),
    }
    assert {name: part.half_flops + part.fp8_flops for name, part in passes(step).items()} == expected


def test_bytes_stay_near_the_floor(step: list[Launch], kind: str) -> None:
    assert read(step) <= READS[kind] * floor_bytes(step)
    assert len(step) <= NODES[kind]


def test_logits_are_few(step: list[Launch]) -> None:
    assert read(step, LOGITS) + written(step, LOGITS) <= 0.15e9


@pytest.mark.parametrize("params", [SAMPLED, FILTERED], ids=["T=1", "filters"])
def test_sampling_adds_little(step: list[Launch], kind: str, params: Any) -> None:
    sampled = count(Step("d2sd", kind, params=params))
    assert read(sampled) + written(sampled) <= 1.05 * (read(step) + written(step))


# -- docs/roofline.md --------------------------------------------------------------------------------------------------

PAGE = ROOT / "docs" / "roofline.md"


def script() -> dict[str, Any]:
    return runpy.run_path(str(PAGE.with_suffix(".py")))


def assert_on_the_page(made: dict[str, Any], *found: Step) -> None:
    lines = PAGE.read_text("utf-8").splitlines()
    for line in (line for step in found for line in (made["counts"](step), made["times"](step))):
        assert f"| {' | '.join(line)} |" in lines, "run python -m docs.roofline"


def test_the_page_has_this_step() -> None:
    """One row of each table."""
    assert_on_the_page(script(), Step("d2sd"))


@pytest.mark.slow
def test_the_page_has_the_bounds_and_each_policy() -> None:
    """A third of the rows of two batch sizes: every policy in both types, both draft vocabularies."""
    found = [step for step in rows() if step.batch in (1, 8)][::3]
    assert {(step.policy, step.kind) for step in found} >= {(n, k) for n in BATCHES for k in READS} - {("off", "fp8")}
    assert {step.drafted is None for step in found} == {True, False}
    made = script()
    assert_on_the_page(made, *found)
    assert made["bounds"]() in PAGE.read_text("utf-8"), "run python -m docs.roofline"


def test_the_page_has_every_row() -> None:
    assert {step.policy for step in rows()} == set(BATCHES)
    assert len({step.name for step in rows()}) == len(rows())


@pytest.mark.slow
@pytest.mark.full
def test_the_page_is_current() -> None:
    assert script()["page"]() == PAGE.read_text("utf-8"), "run python -m docs.roofline"
