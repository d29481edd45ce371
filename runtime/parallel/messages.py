"""Messages from rank 0 to the other ranks: the inputs of a pass, as a frame of JSON and the bytes of its tensors.

    frame    FRAME bytes: {"kind", "values", "tensors": [[type, shape], ...]} and spaces
    tensors  one behind the other, each from a multiple of 8 bytes; this broadcast is left out where there are none

Ranks are processes of one user on one machine, started by rank 0; still, nothing that they receive is code.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, fields, is_dataclass, replace
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from d2sd.modeling.kv_pool import PoolSizes
from d2sd.modeling.tensor_parallel import Group
from d2sd.modeling.where import Where
from d2sd.plugins.trees import Draft, Tree
from d2sd.policies import DrafterRole
from d2sd.runtime.batch import Batch
from d2sd.runtime.cuda_graphs.inputs import Link
from d2sd.runtime.sampling.bias import Entries, TokenBias
from d2sd.runtime.sampling.penalties import Penalties
from d2sd.runtime.sampling.sample import Sampling
from d2sd.runtime.speculation.policy import Policy, policy_class

FRAME = 4096
_ALIGNMENT = 8
_DATACLASSES = PoolSizes, Batch, Where, Sampling, TokenBias, Entries, Penalties, Link, Draft, Tree
_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in _DATACLASSES}
_TYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.int64, torch.int32, torch.float32, torch.float16, torch.bfloat16, torch.bool)
}


def send(group: Group, kind: str, *values: object) -> None:
    """Send a message to all other ranks: tensors, dataclasses of them, policies, numbers, None, tuples of these."""
    tensors: list[Tensor] = []
    described = [_described(value, tensors) for value in values]
    shapes = [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in tensors]
    frame = json.dumps({"kind": kind, "values": described, "tensors": shapes}, separators=(",", ":")).encode()
    if len(frame) > FRAME:
        raise ValueError(f"{kind}: a frame of {len(frame)} bytes; long values are tensors")
    group.broadcast(torch.frombuffer(bytearray(frame.ljust(FRAME)), dtype=torch.uint8))
    payload, parts = _payload([(tensor.nbytes, tensor) for tensor in tensors])
    if payload.numel():
        for part, tensor in zip(parts, tensors, strict=True):
            part.copy_(tensor.cpu().contiguous().flatten().view(torch.uint8))
        group.broadcast(payload)


def receive(group: Group) -> tuple[str, list[Any]]:
    """Wait for the next message; its tensors are on the host."""
    frame = group.broadcast(torch.empty(FRAME, dtype=torch.uint8))
    message = json.loads(frame.numpy().tobytes())
    shapes = [(_TYPES[name], tuple(shape)) for name, shape in message["tensors"]]
    empty = [torch.empty(shape, dtype=dtype, device="meta") for dtype, shape in shapes]
    payload, parts = _payload([(tensor.nbytes, tensor) for tensor in empty])
    if payload.numel():
        group.broadcast(payload)
    tensors = [part.view(dtype).view(shape) for part, (dtype, shape) in zip(parts, shapes, strict=True)]
    return message["kind"], [_restored(value, tensors) for value in message["values"]]


def _payload(sized: Sequence[tuple[int, Tensor]]) -> tuple[Tensor, list[Tensor]]:
    """Room for tensors of these sizes in bytes, and the part of each."""
    sizes = [size for size, _ in sized]
    ends = list(accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes))
    room = torch.zeros(ends[-1] if ends else 0, dtype=torch.uint8)
    return room, [room[start : start + size] for start, size in zip([0, *ends], sizes, strict=False)]


def _described(value: Any, tensors: list[Tensor]) -> Any:
    """The value as JSON, in which a tensor is its number."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if isinstance(value, tuple):
        if value and all(type(number) is int for number in value):
            return {"tuple": _described(torch.tensor(value), tensors)}
        return [_described(part, tensors) for part in value]
    if isinstance(value, Policy):
        return {"policy": value.name, "fields": asdict(value)}
    name = type(value).__name__
    assert _KINDS.get(name) is type(value), name
    assert is_dataclass(value)
    return {name: {field.name: _described(getattr(value, field.name), tensors) for field in fields(value)}}


def _restored(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, list):
        return tuple(_restored(part, tensors) for part in value)
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return tensors[value["tensor"]]
    if "tuple" in value:
        return tuple(_restored(value["tuple"], tensors).tolist())
    if "policy" in value:
        return _policy(value["policy"], json.dumps(value["fields"]))
    ((name, parts),) = value.items()
    return _KINDS[name](**{field: _restored(part, tensors) for field, part in parts.items()})


@cache
def _policy(name: str, values: str) -> Policy:
    made = policy_class(name)(**json.loads(values))  # type: ignore[arg-type]
    return made if made.fallback is None else replace(made, fallback=DrafterRole(made.fallback))
