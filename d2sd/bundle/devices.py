"""Names of devices, and of what computes on them."""

from __future__ import annotations

import re
from typing import Literal

from d2sd.errors import D2SDError

BackendName = Literal["torch", "onnx", "tensorrt"]


def check_device(device: str) -> None:
    """Raise `D2SDError` unless `device` is cpu, cuda, or cuda:N with a GPU of that number."""
    if device == "cpu":
        return
    import torch

    gpus = torch.cuda.device_count()
    number = re.fullmatch(r"cuda(?::([0-9]{1,3}))?", device)
    if number is None or int(number[1] or 0) >= gpus:
        raise D2SDError(
            "No such device.",
            where="device",
            found=repr(device),
            expected=", ".join(["cpu", *(["cuda"] if gpus else []), *(f"cuda:{i}" for i in range(gpus))]),
            fix="choose one of these" if gpus else "use cpu: PyTorch finds no CUDA GPU on this machine",
        )
