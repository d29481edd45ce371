"""The faces of the engine service: `d2sd serve`, Triton Inference Server, and a fleet of NVIDIA Dynamo."""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.load.dynamo import DynamoServer
from benchmarks.load.guests import Guests
from benchmarks.load.guests_http import DynamoGuests, HttpGuests
from benchmarks.load.guests_triton import TritonGuests
from benchmarks.load.server import Server
from benchmarks.load.triton import TritonServer


class Face(NamedTuple):
    """A kind of server, and the clients of its soak test."""

    server: type[Server]
    guests: type[Guests]
    json_log: bool = False


FACES = {
    "serve": Face(Server, HttpGuests, json_log=True),
    "triton": Face(TritonServer, TritonGuests),
    "dynamo": Face(DynamoServer, DynamoGuests),
}
