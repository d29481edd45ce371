"""The attention nodes of exported graphs against nested loops: the functions that graphs carry, in ONNX Runtime, and
what a plugin makes of its inputs, with specifications in place of kernels.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from d2sd.plugins.cascade_attention import AttnMask, PagedContext, cascade_attention, pack_mask_bits
from d2sd.plugins.cascade_attention.onnx import BEHIND, BLOCK, DOMAIN, INPUTS, OPSET, TREE, attributes, functions
from d2sd.plugins.kv_pages import write_pages
from tests.plugins.test_cascade_attention import Call, Shape, ancestors, behind, everyone, make, oracle, spoiled, steps

onnx = pytest.importorskip("onnx", reason="the extra engines is not installed")
onnxruntime = pytest.importorskip("onnxruntime", reason="the extra engines is not installed")
pytest.importorskip("onnxscript", reason="the extra engines is not installed")


def run(name: str, inputs: dict[str, Tensor]) -> Tensor:
    """A graph of one node."""
    types = {torch.float32: onnx.TensorProto.FLOAT, torch.int32: onnx.TensorProto.INT32}
    value = onnx.helper.make_tensor_value_info
    node = onnx.helper.make_node(name, list(INPUTS[name]), ["out"], domain=DOMAIN, **attributes())
    graph = onnx.helper.make_graph(
        [node],
        "attention",
        [value(key, types[x.dtype], [None] * x.dim()) for key, x in inputs.items()],
        [value("out", onnx.TensorProto.FLOAT, [None] * 4)],
    )
    opsets = [onnx.helper.make_opsetid("", OPSET), onnx.helper.make_opsetid(DOMAIN, 1)]
    model = onnx.helper.make_model(graph, opset_imports=opsets, functions=list(functions()), ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (out,) = session.run(None, {key: x.numpy() for key, x in inputs.items()})
    return torch.from_numpy(out)


def run_plugin(name: str, inputs: dict[str, Tensor], patch: pytest.MonkeyPatch) -> Tensor:
    pytest.importorskip("triton", reason="the extra triton is not installed")
    from d2sd.plugins.cascade_attention.tensorrt import enqueue
    from d2sd.plugins.cascade_attention.triton import launch
    from d2sd.plugins.shared import dependent_launch

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        context: PagedContext,
        words: Tensor,
        *,
        first: Tensor | None,
        sinks: Tensor | None,
        out: Tensor,
    ) -> Tensor:
        assert not dependent_launch._allowed.get()
        bits = (words[..., None] >> torch.arange(32, dtype=torch.int32)) & 1
        mask = bits.flatten(2)[..., : q.shape[1]].bool()
        return cascade_attention.reference(q, k, v, context, AttnMask(mask, first), sinks=sinks, out=out)

    def write(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, table: Tensor, *where: Tensor) -> None:
        write_pages.reference(k, v, k_pages, v_pages, table.long(), *where)

    memory = {place: inputs[key] for place, key in enumerate(INPUTS[name])}
    memory[-1] = out = torch.empty_like(inputs["q"])
    patch.setattr(enqueue, "_tensor", lambda shape, kind, at: memory[at])
    patch.setattr(torch.cuda, "get_stream_from_external", lambda *_: None)
    patch.setattr(torch.cuda, "stream", nullcontext)
    patch.setattr(launch, "launch", attend)
    patch.setattr(write_pages, "triton", write)
    enqueue.run(name, [((), "")] * len(INPUTS[name]), list(range(len(INPUTS[name]))), -1, 0)
    return out


def inputs_of(call: Call) -> dict[str, Tensor]:
    context, mask = call.context, call.mask
    first = torch.zeros(call.attn_mask.shape[:2]) if mask.first is None else mask.first
    sinks = torch.full((call.q.shape[2],), -torch.inf) if call.sinks is None else call.sinks
    pages = {"k_pages": context.k_pages, "v_pages": context.v_pages, "page_table": context.page_table.int()}
    rows = {"q": call.q, "k": call.k, "v": call.v, "context_len": context.context_len.int()}
    return pages | rows | {"attn_mask": pack_mask_bits(mask.allowed), "first": first.int(), "sinks": sinks}


@pytest.mark.parametrize(("window", "sinks"), [(1, True), (6, False), (40, True), (None, True)])
def test_trees(window: int | None, sinks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN in front of all windows, and pages there of anybody."""
    call = make(Shape(contexts=(0, 1, 13, 8), rows=6), ancestors)
    call = behind(call, window, steps(ancestors, call), sinks=sinks)
    given = inputs_of(call)
    for found in (run(BEHIND[TREE], given), run_plugin(BEHIND[TREE], given, monkeypatch)):
        torch.testing.assert_close(found.double(), oracle(call), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("number", [torch.nan, torch.inf, 3e38])
@pytest.mark.parametrize("name", [TREE, BEHIND[TREE]])
def test_a_broken_row_reaches_those_who_see_it(name: str, number: float) -> None:
    healthy = make(Shape(contexts=(9, 0, 4), rows=6), ancestors)
    for row in (0, 2):
        call = spoiled(healthy, 1, row, number, keys=False)
        found, expected = (run(name, {key: inputs_of(x)[key] for key in INPUTS[name]}) for x in (call, healthy))
        reached = torch.zeros(3, 6, dtype=torch.bool)
        reached[1] = call.attn_mask[1, :, row]
        assert torch.equal(found[~reached], expected[~reached])
        assert found[reached][:, :3].isnan().flatten(1).any(1).all() or number == 3e38


@pytest.mark.parametrize("window", [1, 3, 6])
def test_blocks_behind_new_context(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last rows of a context, two at most, are not in the pages yet: some windows begin among them."""
    call = make(Shape(contexts=(0, 1, 13, 8), rows=5), everyone)
    call = behind(call, window, steps(everyone, call), sinks=True)
    given, context = inputs_of(call), call.context
    new_len = context.context_len.clamp(max=2)
    size = context.k_pages.shape[1]
    pages = {"k": context.k_pages.clone(), "v": context.v_pages.clone()}
    new = {name: torch.full((4, 2, *call.k.shape[2:]), torch.nan) for name in pages}
    for request, length in enumerate(context.context_len.tolist()):
        for row, place in enumerate(range(length - int(new_len[request]), length)):
            page = context.page_table[request, place // size]
            for name, stored in pages.items():
                new[name][request, row] = stored[page, place % size]
                stored[page, place % size] = torch.nan
    for name in pages:
        given |= {f"new_{name}": new[name], f"{name}_pages": pages[name]}
    given |= {"new_len": new_len.int(), "context_len": (context.context_len - new_len).int()}
    for found in (run(BEHIND[BLOCK], given), run_plugin(BEHIND[BLOCK], given, monkeypatch)):
        torch.testing.assert_close(found.double(), oracle(call), rtol=1e-5, atol=1e-5)


def test_without_windows_the_nodes_are_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    call = make(Shape(contexts=(9, 0, 4)), ancestors)
    given = inputs_of(call)
    plain = run(TREE, {name: x for name, x in given.items() if name in INPUTS[TREE]})
    torch.testing.assert_close(run(BEHIND[TREE], given), plain, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(run_plugin(TREE, given, monkeypatch), plain, rtol=1e-5, atol=1e-6)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(run(BEHIND[TREE], given | {"sinks": torch.ones(6)}), plain)
