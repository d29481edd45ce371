"""A client that opens streams on a server, prints a line and reads until the test kills it. It imports little:
`python -S victim.py HOST PORT STREAMS FIELDS`, where FIELDS are more fields of the body, in JSON.
"""

import json
import socket
import sys

BODY = {"messages": [{"role": "user", "content": "w5 w7"}], "stream": True, "max_tokens": 64, "ignore_eos": True}


def main(host: str, port: int, streams: int, fields: str) -> None:
    """Read until the server has ended every stream."""
    body = json.dumps({**BODY, **json.loads(fields)}).encode()
    sockets = [socket.create_connection((host, port)) for _ in range(streams)]
    for one in sockets:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        one.sendall(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
    print("sent", flush=True)
    for one in sockets:
        while one.recv(4096):
            pass


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
