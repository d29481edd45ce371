"""What an evaluation asks of the engine: log-likelihoods of a full causal pass, texts that end where they should."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from d2sd.bench.accuracy.scoring import Scorer
from d2sd.bundle.load import Bundle, load_bundle
from d2sd.bundle.serving import make_engine
from d2sd.errors import RequestError
from d2sd.recipe import Policy
from tests.d2sd.serve.conftest import build_tiny
from tests.tiny import full_logits

PROMPTS = ["w5 w7 w9", "w31", "w3 w4 w5 w6 w7 w8"]
PAIRS = [([5, 7, 9], [11, 3]), ([31], [4]), ([3, 4, 5, 6], [7, 8, 9, 10, 11])]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder: Path = build_tiny(tmp_path_factory.mktemp("scoring"))
    return load_bundle(folder)


def scorer(bundle: Bundle, policy: Policy = "hybrid") -> Scorer:
    return Scorer(bundle, make_engine(bundle, policy=policy), max_new_tokens=12)


def expected(bundle: Bundle, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    tokens = torch.tensor([[*context, *continuation]])
    logprobs = full_logits(bundle.target, tokens)[0].log_softmax(-1)
    rows = range(len(context) - 1, len(context) + len(continuation) - 1)
    found = [(logprobs[row, token].item(), logprobs[row].argmax().item() == token)
             for row, token in zip(rows, continuation, strict=True)]  # fmt: skip
    return sum(value for value, _ in found), all(best for _, best in found)


def greedy(bundle: Bundle, context: list[int], length: int) -> list[int]:
    tokens = list(context)
    for _ in range(length):
        tokens.append(int(full_logits(bundle.target, torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(context) :]


@pytest.mark.parametrize("policy", ["off", "hybrid"])
def test_scores_are_those_of_a_full_pass(bundle: Bundle, policy: Policy) -> None:
    pairs = [*PAIRS, ([5, 7, 9], greedy(bundle, [5, 7, 9], 3))]
    wanted = [expected(bundle, *pair) for pair in pairs]
    found = scorer(bundle, policy).score(pairs * 2)  # the same context again: a prefix hit must not hide its rows
    assert [best for _, best in found] == [best for _, best in wanted] * 2
    assert found[3][1]
    assert [value for value, _ in found] == pytest.approx([value for value, _ in wanted] * 2, abs=1e-4)


def test_a_context_that_does_not_fit_loses_its_first_tokens(bundle: Bundle) -> None:
    one = scorer(bundle)
    long = [3 + i % 20 for i in range(one.max_prompt + 7)]
    ((found, _),) = one.score([(long, [5, 6])])
    kept = [*long, 5, 6][-one.max_prompt :]
    assert found == pytest.approx(expected(bundle, kept[:-2], [5, 6])[0], abs=1e-4)
    assert one.usage.truncated == 1
    with pytest.raises(RequestError, match="room for the continuation"):
        one.score([([5], long)])
    with pytest.raises(RequestError, match="a token of context"):
        one.score([([], [5])])


def test_texts_end_before_a_stop_string_and_at_their_length(bundle: Bundle) -> None:
    plain = scorer(bundle, "off")
    full = plain.generate([(prompt, {"do_sample": False}) for prompt in PROMPTS])
    assert full == scorer(bundle).generate([(prompt, {"temperature": 0.0}) for prompt in PROMPTS])
    assert plain.usage.generated == sum(len(answer) for answer in plain.usage.answers if isinstance(answer, list))
    text = next(text for text in full if len(text.split()) > 3)
    word = text.split()[2]
    found = plain.generate([(PROMPTS[full.index(text)], {"until": [word, ""], "max_gen_toks": 10})])
    assert found == [text.split(word)[0]]
    assert len(plain.generate([(PROMPTS[0], {"until": "none", "max_gen_toks": 2})])[0].split()) <= 2


def test_sampling_arguments_count_only_where_the_task_samples(bundle: Bundle) -> None:
    one = scorer(bundle)
    greedy_text = one.generate([(PROMPTS[0], {"do_sample": False, "temperature": 1.5, "seed": 4})])
    sampled = one.generate([(PROMPTS[0], {"do_sample": True, "temperature": 1.5, "seed": 4})])
    assert greedy_text == one.generate([(PROMPTS[0], {})]) != sampled
    with pytest.raises(RequestError, match="num_beams"):
        one.generate([(PROMPTS[0], {"num_beams": 4})])


@pytest.mark.parametrize("template", ["{{ m.content }}", "{{ m.content|trim }}!"], ids=["as written", "trimmed"])
@pytest.mark.parametrize("last", ["w1  ", "w1"])
def test_chats_are_rendered_as_by_transformers(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, template: str, last: str
) -> None:
    whole = "{% for m in messages %}[" + template + "]{% endfor %}{{ 'go' if add_generation_prompt }}"
    monkeypatch.setattr(bundle.tokenizer, "chat_template", whole)
    turns, one = [{"role": "user", "content": " w2 "}, {"role": "assistant", "content": last}], scorer(bundle)
    for opened in (True, False):
        wanted = bundle.tokenizer.apply_chat_template(
            turns, tokenize=False, add_generation_prompt=opened, continue_final_message=not opened
        )
        assert one.render(turns, opened) == wanted
    monkeypatch.setattr(bundle.tokenizer, "chat_template", "{{ messages[0].content }}")
    with pytest.raises(RequestError, match="leaves out the last message"):
        one.render(turns, False)
