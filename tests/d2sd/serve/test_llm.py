"""The Python API against the engine it drives: the same tokens, text that adds up, errors that name the argument."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

import d2sd
from d2sd import LLM, Completion, SamplingParams
from d2sd.bundle.load import load_bundle
from d2sd.bundle.serving import make_engine
from d2sd.errors import RequestError
from d2sd.recipe import Policy
from d2sd.runtime.request import Request
from tests.d2sd.serve.conftest import build_tiny
from tests.d2sd.serve.engines import idle
from tests.d2sd.serve.http import wait_until

PROMPTS = ["w5 w7 w9", "w31", "w3 w4 w5 w6 w7 w8"]
USER = {"role": "user", "content": "w5 w7"}


@pytest.fixture
def llm(tiny_bundle: Path) -> LLM:
    return LLM(tiny_bundle)


def plain(bundle: Path, prompts: list[list[int]], sampling: SamplingParams, length: int) -> list[list[int]]:
    """Return what the engine generates without speculation, one request at a time."""
    loaded = load_bundle(bundle)
    engine = make_engine(loaded, policy="off", max_batch=1)
    stop = frozenset(loaded.stop_token_ids)
    return [engine.generate([Request(tuple(ids), length, sampling, stop)])[0].answer for ids in prompts]


@pytest.mark.sampled(7)
@pytest.mark.parametrize("policy", ["off", "chain", "d2sd", "hybrid"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_generate_is_lossless(tiny_bundle: Path, policy: Policy, temperature: float) -> None:
    sampling = SamplingParams(temperature=temperature, seed=3, max_tokens=12)
    with LLM(tiny_bundle, policy=policy) as llm:
        answers = llm.generate(PROMPTS, sampling)
        tokenizer = load_bundle(tiny_bundle).tokenizer
    prompts = [[int(word[1:]) for word in prompt.split()] for prompt in PROMPTS]
    assert [answer.prompt_token_ids for answer in answers] == prompts
    assert [answer.token_ids for answer in answers] == plain(tiny_bundle, prompts, sampling, 12)
    for answer in answers:
        assert answer.text == tokenizer.decode(answer.token_ids, skip_special_tokens=True)
        assert answer.finish_reason == ("stop" if answer.token_ids[-1] == 2 else "length")
        assert answer.stats.policies.total() == answer.stats.steps > 0


def test_generate_takes_the_defaults_of_the_recipe_and_parameters_for_each_prompt(llm: LLM, tiny_bundle: Path) -> None:
    (answer,) = llm.generate("w5 w7")
    assert [answer.token_ids] == plain(tiny_bundle, [[5, 7]], SamplingParams(), 16)
    params = [SamplingParams(max_tokens=3), SamplingParams(temperature=1.0, seed=8, max_tokens=5)]
    assert [len(answer.token_ids) for answer in llm.generate(PROMPTS[:2], params)] == [3, 5]
    assert llm.generate(PROMPTS[:2], params)[1].token_ids == llm.generate(PROMPTS[1], params[1])[0].token_ids


def test_chat_applies_the_template_to_every_message(llm: LLM) -> None:
    conversation = [
        {"role": "system", "content": "w1"},
        USER,
        {"role": "assistant", "content": "w6"},
        {"role": "user", "content": "w8"},
    ]
    one = llm.chat(conversation, SamplingParams(max_tokens=4))
    assert [answer.prompt_token_ids for answer in one] == [[10, 1, 11, 5, 7, 12, 6, 11, 8, 12]]
    both = llm.chat([conversation, [USER]], SamplingParams(max_tokens=4))
    assert both[0].token_ids == one[0].token_ids
    assert both[1].prompt_token_ids == [11, 5, 7, 12]


@pytest.mark.slow
@pytest.mark.parametrize("prompt", ["w5 w7", [USER]], ids=["text", "messages"])
def test_stream_adds_up_to_the_whole_completion(llm: LLM, prompt: Any) -> None:
    whole: Completion = (llm.generate if isinstance(prompt, str) else llm.chat)(prompt)[0]
    streams = [list(llm.stream(prompt)) for _ in range(5)]
    assert ["".join(pieces) for pieces in streams] == [whole.text] * 5
    assert max(map(len, streams)) > 1  # a reader that comes late may get all steps as one piece


def test_streams_share_the_batch(llm: LLM) -> None:
    expected = [llm.generate(prompt)[0].text for prompt in PROMPTS[:2]]
    first, second = (llm.stream(prompt) for prompt in PROMPTS[:2])
    texts = [next(first), next(second)]
    texts[1] += "".join(second)  # runs the first to its end as well: its text must wait for its own reader
    texts[0] += "".join(first)
    assert texts == expected


def test_a_stream_that_is_closed_leaves_the_batch(llm: LLM) -> None:
    stream = llm.stream(PROMPTS[0])
    next(stream)
    stream.close()
    wait_until(lambda: llm.stats.steps > 0)
    # a reader that comes late gets pieces of several steps as one
    assert "".join(llm.stream(PROMPTS[1])) == "".join(llm.stream(PROMPTS[1]))
    wait_until(lambda: idle(llm._session.open()[1]))


def test_stop_strings_end_a_completion(llm: LLM) -> None:
    whole = llm.generate("w5 w7")[0].text
    stop = whole.split()[2]
    cut = llm.generate("w5 w7", SamplingParams(max_tokens=16, stop=stop))[0]
    assert (cut.text, cut.finish_reason) == (whole[: whole.index(stop)], "stop")


def test_stats_sum_over_requests(llm: LLM) -> None:
    answers = [*llm.generate(PROMPTS), *llm.generate(PROMPTS[0])]
    assert llm.stats.steps == sum(answer.stats.steps for answer in answers)
    assert llm.stats.tokens == sum(answer.stats.tokens for answer in answers)


def test_a_closed_llm_refuses_requests_and_keeps_its_stats(tiny_bundle: Path) -> None:
    with LLM(tiny_bundle) as llm:
        llm.generate(PROMPTS[0])
        stream = llm.stream(PROMPTS[0])
        next(stream)
    assert llm.stats.steps > 0
    for call in (lambda: llm.generate("w5"), lambda: llm.chat([USER]), lambda: list(stream)):
        with pytest.raises(RequestError, match=r"The LLM is closed[\s\S]*fix: open the bundle again"):
            call()


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda llm: llm.generate([]), None),
        (lambda llm: llm.generate(["w5", ""]), "prompt"),
        (lambda llm: llm.generate("w5", SamplingParams(max_tokens=64)), "max_tokens"),
        (lambda llm: llm.generate(["w5", "w6"], [SamplingParams()]), "sampling_params"),
        (lambda llm: llm.chat([]), "messages"),
        (lambda llm: llm.chat([{"role": "user"}]), r"messages\[0\]"),
        (lambda llm: llm.chat("w5 w7"), r"messages[\s\S]*str: w5 w7"),
        (lambda llm: llm.chat([USER, USER]), "roles must alternate"),
        (lambda llm: list(llm.stream("")), "prompt"),
    ],
)
def test_errors_name_the_argument_and_leave_nothing_queued(llm: LLM, call: Any, named: str | None) -> None:
    if named is None:
        assert call(llm) == []
    else:
        with pytest.raises(RequestError, match=named):
            call(llm)
    assert idle(llm._session.open()[1])
    assert llm.stats.steps == 0


def test_a_target_without_a_template_refuses_messages(tmp_path: Path) -> None:
    with LLM(build_tiny(tmp_path, template=None)) as llm, pytest.raises(RequestError, match="needs a chat template"):
        llm.chat([USER])


def test_importing_d2sd_loads_no_torch() -> None:
    code = (
        "import sys, d2sd; d2sd.__version__; d2sd.SamplingParams(); d2sd.RequestError; d2sd.DeadlineExceeded;"
        "print(*{'torch', 'transformers', 'numpy'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_the_public_names() -> None:
    assert d2sd.__version__ == version("d2sd")
    assert dir(d2sd) == sorted(d2sd.__all__)
    named = {name: module for module, names in d2sd._MODULES.items() for name in names}
    assert {*named, "__version__"} == set(d2sd.__all__)
    for name, module in named.items():
        assert getattr(d2sd, name).__module__ == module
    with pytest.raises(AttributeError, match="no attribute 'llm'"):
        _ = d2sd.llm


def test_a_caller_can_catch_every_error_of_a_request() -> None:
    from d2sd.serve import errors

    for error in (d2sd.BundleError, d2sd.RequestError, d2sd.GenerationError, errors.QueueFull, errors.ShuttingDown):
        assert issubclass(error, d2sd.D2SDError)
