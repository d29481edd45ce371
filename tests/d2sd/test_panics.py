"""A panic of the tokenizer's Rust code is an error of one request, in the words of every face."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from d2sd import LLM, SamplingParams
from d2sd.cli.main import main
from d2sd.convert.checkpoint.offline import load_tokenizer
from d2sd.errors import CheckpointError, D2SDError, RequestError
from d2sd.panics import is_panic, panics_as
from d2sd.runtime.grammar.guidance import GuidanceTokenizer
from tests.d2sd.serve.conftest import build_tiny
from tests.d2sd.serve.http import Running, serving

#: An expression that tries a run of this letter in every way.
EVIL = Regex("(x+x+)+y")
TEXT = "x" * 40
#: A token whose text the decoder cannot bear.
UNSPEAKABLE = 63
FAILED = "The target's tokenizer fails on these tokens."


def words(expression: Regex = EVIL) -> Any:
    """The words of the tiny project, split and joined by an expression that its engine gives up on."""
    names = {f"w{i}": i for i in range(64)} | {TEXT: UNSPEAKABLE}
    del names["w63"]
    tokenizer = Tokenizer(models.WordLevel(names, unk_token="w0"))
    split = pre_tokenizers.Split(expression, "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.Whitespace()])
    tokenizer.decoder = decoders.Sequence([decoders.Replace(expression, " ")])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", eos_token="w2")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("panics"), words=words())


@pytest.fixture(scope="module")
def server(bundle: Path) -> Iterator[Running]:
    with serving(bundle) as running:
        yield running


FORCED: dict[str, Any] = {"logit_bias": {str(UNSPEAKABLE): 100}, "max_tokens": 3, "temperature": 0}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": TEXT}),
    ("/v1/completions", {"prompt": ["w5", f"w5 {TEXT}"]}),
    ("/v1/completions", {"prompt": "w5", "bad_words": [TEXT]}),
    ("/v1/completions", {"prompt": [UNSPEAKABLE], "echo": True, "max_tokens": 1}),
    ("/v1/completions", {"prompt": "w5", **FORCED}),
    ("/v1/completions", {"prompt": "w5", "n": 2, **FORCED}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT}], "stream": True}),
    ("/v1/responses", {"input": TEXT}),
    ("/trace", {"messages": [{"role": "user", "content": TEXT}]}),
    ("/tokenize", {"prompt": TEXT}),
    ("/detokenize", {"tokens": [5, UNSPEAKABLE]}),
]


@pytest.mark.parametrize(("path", "body"), REQUESTS, ids=range(len(REQUESTS)))
def test_the_server_refuses_the_request_and_lives_on(server: Running, path: str, body: dict[str, Any]) -> None:
    response = server.http.post(path, json=body)
    error = response.json()["error"]
    assert (response.status_code, set(error)) == (400, {"message", "type", "param", "code"})
    assert error["message"].startswith(
        ("The target's tokenizer fails on this text.", "The target's tokenizer fails on these tokens.")
    )
    assert server.http.post("/v1/completions", json={"prompt": "w5 w7", "max_tokens": 2}).status_code == 200
    assert server.service.health is None


def test_a_stream_that_has_begun_ends_with_the_error(server: Running) -> None:
    text = server.http.post("/v1/completions", json={"prompt": "w5", "stream": True, **FORCED}).text
    assert FAILED in text
    assert text.endswith("data: [DONE]\n\n")
    assert server.service.health is None


def test_python_and_the_command_line_get_an_error_of_the_family(bundle: Path) -> None:
    with LLM(bundle) as llm:
        with pytest.raises(RequestError, match=r"tokenizer fails on this text(.|\n)*retry-limit"):
            llm.generate(TEXT)
        with pytest.raises(RequestError, match="tokenizer fails on these tokens"):
            llm.generate("w5", SamplingParams(max_tokens=2, logit_bias={UNSPEAKABLE: 100}))
        assert llm.generate("w5 w7", SamplingParams(max_tokens=2))[0].text
    done = CliRunner().invoke(main, ["generate", str(bundle), "-p", TEXT, "--max-new-tokens", "2"])
    assert (done.exit_code, done.output.partition("\n")[0]) == (2, "error: The target's tokenizer fails on this text.")


@pytest.fixture(scope="module")
def panic() -> BaseException:
    """A panic as pyo3 raises it."""
    with pytest.raises(BaseException, match="retry-limit") as raised:
        words()(TEXT)
    return raised.value


def failing(error: BaseException) -> Any:
    def fail(*arguments: Any, **options: Any) -> None:
        raise error

    return fail


def test_only_panics_become_errors(panic: BaseException) -> None:
    assert is_panic(panic)
    assert not isinstance(panic, Exception)
    for error in (KeyboardInterrupt(), asyncio.CancelledError(), SystemExit(3)):
        assert not is_panic(error)
        with pytest.raises(type(error)), panics_as(RequestError, "never"):
            raise error


def test_a_tokenizer_that_cannot_be_read_or_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, panic: BaseException
) -> None:
    words().save_pretrained(tmp_path)
    assert type(load_tokenizer(tmp_path)).__name__ == type(words()).__name__, "saved settings name the class"
    monkeypatch.setattr("llguidance.LLTokenizer", failing(panic))
    with pytest.raises(D2SDError, match="llguidance fails"):
        GuidanceTokenizer(words(), frozenset({2}), 64)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", failing(panic))
    with pytest.raises(CheckpointError, match="The tokenizer cannot be read"):
        load_tokenizer(tmp_path)


def test_a_panic_that_nobody_expected(
    monkeypatch: pytest.MonkeyPatch, server: Running, bundle: Path, panic: BaseException
) -> None:
    monkeypatch.setattr(server.server.requests, "completion", failing(panic))
    response = server.http.post("/v1/completions", json={"prompt": "w5"})
    assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")
    monkeypatch.setattr("d2sd.bundle.load.load_bundle", failing(panic))
    done = CliRunner().invoke(main, ["generate", str(bundle), "-p", "w5"])
    assert (done.exit_code, "internal error: PanicException" in done.output) == (70, True)
