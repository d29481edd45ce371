"""The clients of the soak test that speak to Triton: over decoupled gRPC streams, and over HTTP for whole answers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from benchmarks.load.client import Reply
from benchmarks.load.guests import Guests
from benchmarks.load.tensors import tensor, tensors
from benchmarks.load.triton import TritonServer
from d2sd.serve.triton.names import INPUTS

if TYPE_CHECKING:
    from tritonclient.grpc import InferInput

#: Seconds after which a request counts as a hang.
_HANG = 60.0
#: Values that an input should not have, or that lie at the edge of what it may; and ordinary ones.
_INTEGERS = [0, 1, 2, 5, 2**31 - 1]
_EDGES: dict[str, list[Any]] = {
    "STRING": [
        *("", "\x00", "w5", b"\xff\xfe", "a" * 5000, "{", "[]", '{"n": 3}', '{"prompt": [[1]]}'),
        *('{"max_tokens": 1e999}', '{"a":' * 2_000, '{"seed": ' + "9" * 5000 + "}", "json", "regex", "("),
        '{"type": 5}',
    ],
    "BOOL": [True, False],
    "INT32": [*_INTEGERS, -1, -(2**31)],
    "INT64": [*_INTEGERS, -1, 2**63 - 1],
    "UINT32": [*_INTEGERS, 2**32 - 1],
    "UINT64": [*_INTEGERS, 2**64 - 1],
    "FP32": [0.0, 0.7, 1.0, -1.0, 3e38, float("nan"), float("inf")],
}


class TritonGuests(Guests):
    """Clients of a Triton server."""

    def kinds(self) -> list[Callable[[], Awaitable[str]]]:
        return [*super().kinds(), self.has_a_deadline, self.is_malformed]

    async def asks_whole(self) -> str:
        """Ask the HTTP endpoint `generate`, which has the status 400 for all errors."""
        assert isinstance(self.server, TritonServer)
        body, text = self.any()
        async with httpx.AsyncClient(timeout=300) as client:
            response = await client.post(self.server.generate_url, json=self.client.inputs(body, stream=False))
        found = response.json()
        if response.status_code == 200:
            return self.judge(Reply(200, text=found["text_output"]), text)
        if "Too many requests" not in found["error"]:
            raise ValueError(found["error"])
        return "refused"

    async def disconnects(self) -> str:
        """Cancel the stream before the answer, or in the middle of it."""
        body, text = self.any()
        inputs = tensors(self.client.inputs(body) | {"return_num_output_tokens": True, "return_num_input_tokens": True})
        reply = await self.client.send(inputs, leave=self.draw.randint(1, 4))
        if reply.error is not None:
            return self.judge(reply, text)
        if not text.startswith(reply.text):
            raise ValueError(f"wrong beginning: {reply.text!r} instead of {text!r}")
        return "left"

    def victim(self) -> tuple[str, ...]:
        return str(Path(__file__).with_name("victim_grpc.py")), self.server.url, self.server.model, "4", "64"

    async def is_malformed(self) -> str:
        """A malformed request."""
        seed = self.draw.randrange(1 << 30)
        draw = random.Random(seed)
        model = "no-such-model" if draw.random() < 0.03 else None
        reply = await asyncio.wait_for(self.client.send(malformed(draw), model=model), _HANG)
        if reply.error is not None and reply.error["code"] not in ("other", self.full):
            raise ValueError(f"seed {seed}: {reply.error}")
        return "answered" if reply.error is None else "refused"


def malformed(draw: random.Random) -> list[InferInput]:
    """A valid request with some inputs replaced, left out, invented, or of another type or shape."""
    values: dict[str, InferInput] = {one.name(): one for one in tensors({"text_input": "w5 w7", "max_tokens": 2})}
    for _ in range(draw.randint(1, 3)):
        name = draw.choice([*INPUTS])
        declared = INPUTS[name].data_type
        match draw.randrange(8):
            case 0:
                values.pop(draw.choice([*values]), None) if values else None
            case 1:
                values["x"] = tensor("x", 1, "INT32")
            case 2:
                other = draw.choice([*_EDGES])
                values[name] = tensor(name, draw.choice(_EDGES[other]), other)
            case 3:
                value = draw.choice(_EDGES[declared])
                count, shape = draw.choice([(1, (1, 1)), (2, (2,)), (0, (0,)), (4, (2, 2)), (30, (30,))])
                values[name] = tensor(name, [value] * count, declared, shape)
            case _:
                values[name] = tensor(name, draw.choice(_EDGES[declared]), declared)
    return [*values.values()]
