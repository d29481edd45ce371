"""Logits that are not finite numbers end the request that they belong to, and no other."""

from __future__ import annotations

import pytest
import torch

from d2sd.errors import UnexpectedError
from d2sd.modeling.decoder import Decoder
from d2sd.modeling.drafters.dflash import Drafter
from d2sd.modeling.drafters.flexdraft import FlexHead
from d2sd.runtime.request import Request
from d2sd.runtime.sampling_params import SamplingParams
from d2sd.runtime.sequence import Sequence
from tests.runtime.helpers import BLOCK, make_engine
from tests.runtime.soak import Thirds
from tests.tiny import runner_of, tiny_decoder, tiny_drafter, tiny_flex


def models(bad: int | None = None) -> tuple[Decoder, Drafter, Drafter, FlexHead]:
    """Arguments of a runner whose target makes NaN once it has read the token `bad`."""
    target = tiny_decoder("qwen3", layers=2, head_dim=16, tie=False)
    if bad is not None:
        with torch.no_grad():
            target.embed_tokens.weight[bad] = torch.nan
    first = tiny_drafter(target.config, block_size=BLOCK, layers=1)
    second = tiny_drafter(target.config, block_size=BLOCK, layers=1, role="variable_prefix", seed=2)
    return target, first, second, tiny_flex(target, block_size=BLOCK)


def check_error(sequence: Sequence) -> None:
    assert sequence.finish == "error"
    assert isinstance(sequence.error, UnexpectedError)  # no fault of the request
    assert sequence.error.where == "logits"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_does_not_hide_it(temperature: float) -> None:
    """Nor does it get the blame: it excludes a third of the tokens, and the message is not about it."""
    runner = runner_of(*models(7)[:3])
    request = Request((7, 1), 9, SamplingParams(temperature, seed=1), grammar=Thirds())
    check_error(make_engine(runner, "d2sd").generate([request])[0])


@pytest.mark.parametrize("grammar", [None, Thirds()])
def test_parameters_that_exclude_every_token_are_named(grammar: Thirds | None) -> None:
    banned = tuple((token,) for token in range(64))
    runner = runner_of(*models()[:3])
    params = SamplingParams(bad_words_token_ids=banned)
    (sequence,) = make_engine(runner).generate([Request((1,), 9, params, grammar=grammar)])
    assert sequence.finish == "error"
    assert "parameters" in str(sequence.error)
    assert ("grammar" in str(sequence.error)) == (grammar is not None)


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
def test_a_trace_shows_tokens_alone(value: float) -> None:
    """Readers of a trace look its tokens up in a vocabulary."""
    target, *drafters, _ = models()
    with torch.no_grad():
        assert target.lm_head is not None
        target.lm_head.weight[:] = value
    engine = make_engine(runner_of(target, *drafters), "d2sd")
    engine.record_trace = True
    engine.submit(Request((1,), 9))
    (output,) = engine.step()
    check_error(output.sequence)
    assert engine.trace is not None
    assert engine.trace.accepted.tokens.min() >= 0
