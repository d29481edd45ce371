"""The fused attention kernel: checked, then timed against its peers on the same inputs.

Every function is checked against the specification at the very shape it is timed at. One whose result is wrong, or
that does not run, gets the reason in place of a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from benchmarks.gpu import peers
from benchmarks.gpu.call import Call, compare, make_call
from benchmarks.gpu.cases import Case, Note, Skip, said
from benchmarks.gpu.flashinfer_peer import NAME as FLASHINFER
from benchmarks.gpu.flashinfer_peer import flashinfer
from benchmarks.gpu.shapes import Shape, flexed, timed
from benchmarks.gpu.timing import Run, Times
from d2sd.plugins.cascade_attention import pack_mask_bits
from d2sd.plugins.cascade_attention.triton.launch import launch

OURS = "ours"
#: A run, and what turns its result into [B, T, Hq, D] of the call; None: there is no result to check.
Peer = tuple[Run, Callable[[Any], Tensor] | None]
#: Largest scores [B, Hq, T, L] in fp32 that PyTorch's own "math" path is asked for: beyond it measures allocation.
MOST_SCORES = 4 << 30


def ours(call: Call) -> Peer:
    """The mask is packed beforehand, as it is once a forward pass."""
    words = pack_mask_bits(call.attn_mask)
    return lambda: launch(call.q, call.k, call.v, call.context, words), lambda out: out


def time_cases() -> Iterator[Case]:
    for shape in timed():
        yield f"times/{shape.name}", partial(time_shape, shape, contiguous_peers)


def flex_cases() -> Iterator[Case]:
    for shape in flexed():
        yield f"flex/{shape.name}", partial(time_shape, shape, flex_peers)


def time_shape(
    shape: Shape, others: Callable[[Shape, Call], dict[str, Callable[[], Peer]]], note: Note, device: str = "cuda"
) -> dict[str, Any]:
    """Our kernel and its peers; FP8 pages are read by ours alone."""
    _fits(shape)
    call = make_call(shape, device)
    return _timed(shape, call, {OURS: lambda: ours(call)} | ({} if shape.fp8 else others(shape, call)), note)


def contiguous_peers(shape: Shape, call: Call) -> dict[str, Callable[[], Peer]]:
    """Peers over K and V side by side, and FlashInfer over pages."""
    keys, values = peers.cleaned(call)
    mask = peers.bias(call)

    def unpack(out: Tensor) -> Tensor:
        return peers.unpacked(out, call)

    def masked(name: str) -> Peer:
        scores = 4 * len(shape.contexts) * shape.heads * shape.rows * keys.shape[2]
        if name == "sdpa math" and scores > MOST_SCORES:
            raise Skip(f"scores of {scores >> 30} GiB")
        return peers.sdpa(call, keys, values, mask, peers.BACKENDS[name]), unpack

    made: dict[str, Callable[[], Peer]] = {name: partial(masked, name) for name in peers.BACKENDS}
    made[peers.FLASH] = lambda: (peers.sdpa(call, keys, values, None, SDPBackend.FLASH_ATTENTION), unpack)
    made[peers.GATHER] = lambda: (lambda: peers.gather(call), None)
    made[FLASHINFER] = lambda: (flashinfer(call), lambda out: out.view(call.q.shape))
    return made


def flex_peers(_: Shape, call: Call) -> dict[str, Callable[[], Peer]]:
    """FlexAttention, and the gather again."""
    keys, values = peers.cleaned(call)
    return {
        peers.GATHER: lambda: (lambda: peers.gather(call), None),
        peers.FLEX: lambda: (peers.flex(call, keys, values), lambda out: out.transpose(1, 2)),
    }


def _timed(shape: Shape, call: Call, made: dict[str, Callable[[], Peer]], note: Note) -> dict[str, Any]:
    """Check and time each; a peer's failure is a figure of the case, our own ends it."""
    times, errors, reasons = Times(), dict[str, dict[str, float]](), dict[str, str]()
    figures: dict[str, Any] = {
        "group": shape.group_name,
        "rows": shape.rows,
        "bytes": shape.bytes_read(),
        "flops": shape.flops(),
    }
    everyone = torch.ones_like(call.attn_mask)
    for name, make in made.items():
        try:
            run, result = make()
            if result is not None:
                errors[name] = compare(result(run()), call, everyone if name == peers.FLASH else None)
            times.add(name, run)
        except Exception as error:
            if name == OURS:
                raise
            reasons[name] = said(error)
            torch.cuda.synchronize()  # raises where the device's context is lost: what follows would fail too
        note(**figures, times=times.figures(), errors=errors, reasons=reasons)
    times.again()
    return figures | {"times": times.figures(), "errors": errors, "reasons": reasons}


def _fits(shape: Shape) -> None:
    free = torch.cuda.mem_get_info()[0]
    if shape.bytes_held() > 0.9 * free:
        raise Skip(f"needs about {shape.bytes_held() >> 30} GiB of device memory, {free >> 30} GiB are free")
