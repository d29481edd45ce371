"""A gRPC client that opens streams on Triton, prints a line at the first response and reads until the test kills it:
`python victim_grpc.py ADDRESS MODEL STREAMS TOKENS`.
"""

import json
import sys
from queue import SimpleQueue
from typing import Any

import numpy as np
import tritonclient.grpc as grpc


def main(address: str, model: str, streams: int, tokens: int) -> None:
    """Read until every stream has ended."""
    prompt = grpc.InferInput("text_input", [1], "BYTES")
    prompt.set_data_from_numpy(np.array([b"w5 w7"], np.object_))
    parameters = grpc.InferInput("sampling_parameters", [1], "BYTES")
    given = json.dumps({"max_tokens": tokens, "ignore_eos": True, "stream": True})
    parameters.set_data_from_numpy(np.array([given.encode()], np.object_))
    arrived: SimpleQueue[Any] = SimpleQueue()
    clients = [grpc.InferenceServerClient(address) for _ in range(streams)]
    for client in clients:
        client.start_stream(lambda result, error: arrived.put((result, error)))
        client.async_stream_infer(model, [prompt, parameters])
    while True:
        print(arrived.get(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
