"""Asks a server without speculation, prefix cache or other requests the bodies that were accepted."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from benchmarks.attack.send import Sent
from benchmarks.attack.verdicts import of_answer
from benchmarks.load.server import Server
from tools.hostile.case import CHAT

#: A server that decodes plainly, one answer at a time.
PLAIN = ("--policy", "off", "--no-prefix-cache", "--max-batch", "1", "--max-waiting", "1000")
#: Routes whose answers are the model's or the tokenizer's.
_COMPARED = (CHAT, "/v1/completions", "/v1/responses", "/tokenize", "/detokenize")
_SEED = re.compile(rb'"seed":\s*(\d+)')
_BROKEN = re.compile(rb'^data: \{"error":', re.MULTILINE)


def texts(server: Server, bodies: Sequence[Mapping[str, Any]]) -> list[str]:
    """The texts of the answers to chats, one after the other."""
    with httpx.Client(base_url=server.url, timeout=600) as client:
        answers = [client.post(CHAT, json=body).raise_for_status().json() for body in bodies]
    return [answer["choices"][0]["message"]["content"] for answer in answers]


def compare(server: Server, sent: Sequence[Sent], timeout: float) -> tuple[int, list[str]]:
    """Ask again for every answer that can be repeated: the number of those compared, and the faults."""
    faults, compared = [], 0
    with httpx.Client(base_url=server.url, timeout=timeout) as client:
        for one in sent:
            if (body := repeatable(one)) is None:
                continue
            compared += 1
            try:
                response = client.post(one.case.path, content=body, headers=one.case.headers)
                plain = response.content if response.status_code == 200 else None
            except httpx.TransportError as error:
                faults.append(f"{one.where}: plain decoding: {type(error).__name__}")
                continue
            faults += of_answer(one.where, one.answer, plain)
    return compared, faults


def repeatable(sent: Sent) -> bytes | None:
    """The body that asks again for an answer, with the seed that it reports; None if it cannot be repeated.

    A deadline is left out, and so is what ended early because of one.
    """
    body = sent.case.asked()
    if not sent.answer or sent.case.method != "POST" or sent.case.path not in _COMPARED or not body:
        return None
    if sent.case.path == "/v1/responses":
        return None if body.get("temperature") or "seed" in body else sent.case.body
    if sent.case.path not in (CHAT, "/v1/completions"):
        return sent.case.body
    if _BROKEN.search(sent.answer):
        return None
    if body.get("seed") is not None and "deadline" not in body:
        return sent.case.body
    body.pop("deadline", None)
    if body.get("seed") is None:  # of n answers the first has the smallest
        body["seed"] = min(map(int, _SEED.findall(sent.answer)))
    return json.dumps(body).encode()
