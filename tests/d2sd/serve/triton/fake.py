"""A stand-in for `triton_python_backend_utils`, which exists inside Triton's stub process only."""

from __future__ import annotations

import json
import weakref
from dataclasses import dataclass, field
from queue import Queue
from types import ModuleType
from typing import Any, ClassVar

import numpy as np

from d2sd.serve.triton.names import INPUTS, OUTPUTS
from d2sd.serve.triton.parameters import Parameters

_FINAL = 1


class Tensor:
    def __init__(self, name: str, array: np.ndarray[Any, Any]) -> None:
        assert name in OUTPUTS or name in INPUTS
        self._name, self._array = name, array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray[Any, Any]:
        return self._array


class TritonError:
    INTERNAL, INVALID_ARG, UNAVAILABLE, CANCELLED = "internal", "invalid", "unavailable", "cancelled"
    UNSUPPORTED = "unsupported"

    def __init__(self, message: str, code: str) -> None:
        self.message, self.code = message, code


@dataclass
class InferenceResponse:
    output_tensors: list[Tensor]
    error: TritonError | None = None


class Metric:
    def __init__(self, family: MetricFamily) -> None:
        self.family, self.value, self.messages = weakref.ref(family), 0.0, 0

    def _live(self) -> None:
        assert self.family() is not None, "Triton has deleted the metric with its family"
        self.messages += 1

    def set(self, value: float) -> None:
        self._live()
        self.value = value

    def increment(self, value: float) -> None:
        self._live()
        assert value >= 0
        self.value += value


class MetricFamily:
    COUNTER, GAUGE = "counter", "gauge"
    metrics: ClassVar[dict[str, Metric]] = {}  # of all families, by name and values of the labels

    def __init__(self, name: str, description: str, kind: str) -> None:
        self.name, self.kind = name, kind

    def Metric(self, labels: dict[str, str]) -> Metric:
        made = Metric(self)
        self.metrics[" ".join((self.name, *labels.values()))] = made
        return made


@dataclass
class ResponseSender:
    """Triton's, which crashes the server when it is asked for anything after the last response."""

    sent: Queue[tuple[InferenceResponse | None, bool]] = field(default_factory=Queue)
    cancelled: bool = False
    ended: bool = False

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        assert not self.ended
        self.ended = bool(flags & _FINAL)
        self.sent.put((response, self.ended))

    def is_cancelled(self) -> bool:
        assert not self.ended
        return self.cancelled


class Request:
    def __init__(self, name: str = "", shape: tuple[int, ...] = (-1,), **inputs: Any) -> None:
        self.sender, self._name = ResponseSender(), name
        dtypes = {"STRING": np.object_, "BOOL": np.bool_}
        self._inputs = []
        for key, value in inputs.items():
            kind = INPUTS[key].data_type
            values = [v.encode() if isinstance(v, str) else v for v in (value if isinstance(value, list) else [value])]
            array = np.array(values, dtypes.get(kind) or getattr(np, kind.lower().replace("fp", "float")))
            self._inputs.append(Tensor(key, array.reshape(shape)))

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def parameters(self) -> str:
        return ""

    def request_id(self) -> str:
        return self._name

    def get_response_sender(self) -> ResponseSender:
        return self.sender

    def next(self) -> tuple[dict[str, Any], bool]:
        """The outputs of the next response, and whether it was the last one."""
        response, final = self.sender.sent.get(timeout=20)
        if response is None:
            return {}, final
        if response.error is not None:
            raise Refused(response.error.code, response.error.message)
        found = {}
        for tensor in response.output_tensors:
            array = tensor.as_numpy()
            assert array.size == 1
            found[tensor.name()] = array.reshape(-1)[0]
        return found, final

    def all(self) -> dict[str, Any]:
        """The outputs of the last response, with the whole text."""
        text, final = b"", False
        while not final:
            outputs, final = self.next()
            text += outputs.get("text_output", b"")
        return outputs | {"text_output": text.decode()}


class Refused(Exception):
    """Code and message."""


def pb_utils() -> ModuleType:
    """The module."""
    module: Any = ModuleType("triton_python_backend_utils")
    module.TRITONSERVER_RESPONSE_COMPLETE_FINAL = _FINAL
    module.TritonModelException = type("TritonModelException", (Exception,), {})
    module.Tensor, module.TritonError = Tensor, TritonError
    module.InferenceResponse, module.MetricFamily = InferenceResponse, MetricFamily
    made: ModuleType = module
    return made


def arguments(parameters: Parameters, *, max_batch_size: int = 0) -> dict[str, str]:
    """The arguments of `initialize`."""
    strings = {name: {"string_value": value} for name, value in parameters.strings().items()}
    return {
        "model_config": json.dumps({"max_batch_size": max_batch_size, "parameters": strings}),
        "model_instance_kind": "CPU",
        "model_instance_device_id": "0",
        "model_name": "tiny",
        "model_instance_name": "tiny_0_0",
    }
