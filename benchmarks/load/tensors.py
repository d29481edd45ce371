"""Values as input tensors of the Triton model, for Triton's gRPC client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from d2sd.errors import D2SDError
from d2sd.serve.triton.names import INPUTS

if TYPE_CHECKING:
    from tritonclient.grpc import InferInput

_DTYPES: dict[str, tuple[str, Any]] = {"STRING": ("BYTES", np.object_), "BOOL": ("BOOL", np.bool_)}
_DTYPES |= {name: (name, getattr(np, name.lower())) for name in ("INT32", "INT64", "UINT32", "UINT64")}
_DTYPES["FP32"] = ("FP32", np.float32)


def tensors(inputs: Mapping[str, Any], shape: tuple[int, ...] = (-1,)) -> list[InferInput]:
    """Inputs of the model as tensors of a shape, each of the type that it declares."""
    return [tensor(name, value, INPUTS[name].data_type, shape) for name, value in inputs.items()]


def tensor(name: str, value: Any, data_type: str, shape: tuple[int, ...] = (-1,)) -> InferInput:
    """A value, or a list of values, as a tensor."""
    wire, dtype = _DTYPES[data_type]
    values = value if isinstance(value, list) else [value]
    encoded = [one.encode() if isinstance(one, str) else one for one in values]
    array = np.array(encoded, dtype).reshape(shape)
    made = triton_client().InferInput(name, list(array.shape), wire)
    made.set_data_from_numpy(array)
    return made


def triton_client() -> Any:
    """The module tritonclient.grpc, which is no dependency of d2sd. Raises D2SDError where it is not installed."""
    try:
        import tritonclient.grpc.aio
    except ImportError:
        raise D2SDError(
            "A load over Triton needs tritonclient and nvidia-pytriton.",
            fix="run it in the environment that `make triton-test` installs: build/triton/env/bin/python",
        ) from None
    return tritonclient.grpc
