"""Triton 24.10 crashes when a response sender is used after its last response."""

from __future__ import annotations

import numpy as np

from d2sd.errors import D2SDError, RequestError
from d2sd.serve.triton.sender import Sender, describe
from tests.d2sd.serve.triton.fake import ResponseSender, pb_utils


def test_nothing_is_asked_of_triton_after_the_last_response() -> None:
    triton = ResponseSender(cancelled=True)
    sender = Sender(triton, pb_utils(), batched=False)
    seen = [sender.cancelled]
    sender.send({"text_output": np.array([b"a"], np.object_)})
    sender.cancel()
    assert triton.ended
    assert [*seen, sender.cancelled] == [True, False]
    sender.end()
    sender.fail(RequestError("late"))
    sender.send({"text_output": np.array([b"b"], np.object_)}, final=True)
    assert triton.sent.qsize() == 2


def test_an_error_of_ours_keeps_its_text() -> None:
    missing = D2SDError("Structured output needs llguidance.", fix="pip install 'd2sd[structured]'")
    assert describe(missing) == (str(missing), "UNSUPPORTED")
    assert describe(KeyError("x")) == ("The model failed to process the request.", "INTERNAL")
