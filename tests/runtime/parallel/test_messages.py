"""Other ranks receive what rank 0 sends, types included."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import cast

import pytest
import torch
from torch import Tensor

from d2sd.modeling.kv_pool import PoolSizes
from d2sd.modeling.tensor_parallel import Group
from d2sd.plugins.trees import Draft
from d2sd.policies import DrafterRole
from d2sd.runtime.batch import Batch
from d2sd.runtime.cuda_graphs.inputs import Link
from d2sd.runtime.pages import page_row
from d2sd.runtime.parallel.messages import FRAME, receive, send
from d2sd.runtime.request import Request
from d2sd.runtime.sampling_params import SamplingParams
from d2sd.runtime.sequence import Sequence
from d2sd.runtime.speculation.policy import make_policy
from d2sd.runtime.thought import Markers
from tests.runtime.helpers import BLOCK, BRANCHES, BUDGET


class Line:
    """A group of which one side sends, then the other receives."""

    def __init__(self) -> None:
        self._sent, self.sending = deque[Tensor](), True

    def broadcast(self, message: Tensor) -> Tensor:
        if self.sending:
            self._sent.append(message.clone())
            return message
        return message.copy_(self._sent.popleft())


def test_policies_and_tensors_arrive_as_they_were() -> None:
    line = Line()
    policy = make_policy("hybrid", block_size=BLOCK, branches=BRANCHES, row_budget=BUDGET)
    policy = replace(policy, fallback=DrafterRole.FIRST)
    send(cast("Group", line), "step", policy, torch.arange(7), (1, 2), None, "text")
    line.sending = False
    kind, (found, numbers, pair, nothing, text) = receive(cast("Group", line))
    assert (kind, found, pair, nothing, text) == ("step", policy, (1, 2), None, "text")
    assert numbers.tolist() == [*range(7)]
    assert type(found.fallback) is DrafterRole
    assert found.fallback.key == "first"


def test_a_step_of_any_parameters_arrives_as_it_was() -> None:
    """All kinds of values: of a batch that filters, penalises and forbids, and of a draft that a grammar leads."""
    params = SamplingParams(0.5, 0.9, 5, 3, min_p=0.1, repetition_penalty=1.2, logit_bias={3: 1.0}, min_tokens=1)
    params = replace(params, thinking_token_budget=4)
    request = Request((1, 2), 9, params, frozenset({4}), markers=Markers("", "", 2, 5))
    sequence = Sequence(0, request, [1, 2, 3], pages=page_row([1]))
    batch = Batch.pack([sequence], 64, "cpu")
    given = batch, Link.pack([sequence], 1), Draft(torch.ones(1, 2, 3), torch.zeros(1, 2, 3)), PoolSizes(3, 4)
    line = Line()
    send(cast("Group", line), "step", *given)
    line.sending = False
    _, found = receive(cast("Group", line))
    assert batch.sampling.used
    assert str(found) == str([*given])


def test_a_frame_has_a_bound() -> None:
    with pytest.raises(ValueError, match="step: a frame of"):
        send(cast("Group", Line()), "step", "x" * FRAME)
