"""transformers' Auto classes load a bundle's target and tokenizer, and say what our decoder says."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.consumers.conftest import Built
from tests.consumers.helpers import TOLERANCE
from tests.tiny import full_logits, random_tokens


@pytest.mark.sampled(2)
@pytest.mark.parametrize("built", ["llama", "qwen2", "qwen3"], indirect=True, scope="session")
def test_it_loads_the_bundles_target_and_says_the_same(built: Built) -> None:
    model = AutoModelForCausalLM.from_pretrained(built.target).eval()
    tokens = random_tokens(built.decoder, 2, 20)
    with torch.no_grad():
        theirs = model(tokens).logits
    torch.testing.assert_close(theirs, full_logits(built.decoder, tokens), atol=TOLERANCE, rtol=0)
    assert model.generation_config.eos_token_id == 2


def test_it_loads_the_bundles_tokenizer(built: Built) -> None:
    """Not of Qwen2, for which it takes no tokenizer but Qwen2's own."""
    assert AutoTokenizer.from_pretrained(built.target)("w5 w7").input_ids == [5, 7]
