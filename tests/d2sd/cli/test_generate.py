"""`d2sd generate`, and what a build proves about its bundle, on a tiny bundle."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args
from weakref import ref

import pytest
from click.testing import Result

import d2sd.build.validate.checks as checks
from d2sd.bench.speculation_table import show_stats
from d2sd.bundle.load import Bundle, load_bundle
from d2sd.bundle.requests import chat_request
from d2sd.bundle.serving import make_engine
from d2sd.errors import BuildError, D2SDError
from d2sd.plugins.trees import Accepted, Tree
from d2sd.policies import FACTS, DrafterRole
from d2sd.prompts import OWN_PROMPTS, read_prompts
from d2sd.recipe import Method
from d2sd.runtime.sampling_params import SamplingParams
from d2sd.runtime.speculation.accept import sample_target
from d2sd.runtime.stats import Clock, EngineStats, SequenceStats
from tests.commands import passed, refused, run_cli, succeeds
from tests.convert.helpers import edit_json, write_project


def run(path: Path, *arguments: str) -> Result:
    return run_cli("generate", path, "--raw", "--max-new-tokens", 12, *arguments)


@pytest.fixture(scope="module")
def bundle(built: Path) -> Bundle:
    return load_bundle(built)


def test_copies_have_one_name(built: Path, bundle: Bundle) -> None:
    """With +lookup they compete even where the recipe leaves them out; statistics name what ran."""
    recipe = bundle.recipe.model_copy(update={"tree": bundle.recipe.tree.model_copy(update={"lookup": False})})
    without = replace(bundle, manifest=bundle.manifest.model_copy(update={"recipe": recipe}))
    for method in get_args(Method):
        name = method.removesuffix("+lookup")
        assert (name == "auto" or FACTS[name].copies) == (name + "+lookup" in get_args(Method))
    assert str(make_engine(without, policy="hybrid").policy).startswith("hybrid of")
    assert str(make_engine(without, policy="hybrid+lookup").policy).startswith("hybrid+lookup of")
    assert str(make_engine(bundle, policy="hybrid").policy).startswith("hybrid+lookup of"), "as the recipe says"
    assert str(make_engine(bundle, policy="hybrid", lookup=False).policy).startswith("hybrid of"), "as it is measured"
    said = run(built, "-p", "w1 w5 w9", "--policy", "ddtree+lookup", "--stats")
    assert "ddtree+lookup of" in said.stderr
    wrong = [run(built, "-p", "w1", "--policy", "copy"), run_cli("bench", "--methods", "copy")]
    assert all("'hybrid+lookup'" in ended.stderr for ended in wrong)


def test_the_seed_decides_a_sampled_text(built: Path) -> None:
    def sampled(seed: str, policy: str, temperature: str = "1.0") -> str:
        return run(built, "-p", "w1 w5", "--temperature", temperature, "--seed", seed, "--policy", policy).stdout

    assert sampled("1", "off") == sampled("1", "d2sd") == sampled("1", "chain")
    assert sampled("1", "off", "0") == sampled("2", "d2sd", "0")
    assert len({sampled(str(seed), "off") for seed in range(4)}) > 1


def test_answers_have_the_order_of_their_prompts(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second ends first, and is printed last."""
    prompts = ("w1 w2", "w7", "w3")
    limits = iter((12, 3, 7))

    def shorter(*arguments: Any, **options: Any) -> Any:
        return replace(chat_request(*arguments, **options), max_new_tokens=next(limits))

    alone = [run(built, "-p", prompt).stdout.split() for prompt in prompts]
    monkeypatch.setattr("d2sd.cli.generate.chat_request", shorter)
    together = run(built, *(word for prompt in prompts for word in ("-p", prompt)))
    parts = together.stdout.split("> ")[1:]
    assert len(parts) == 3
    for part, prompt, words, tokens in zip(parts, prompts, alone, (12, 3, 7), strict=True):
        assert part.startswith(f"{prompt}\n")
        assert part.removeprefix(prompt).split() == words[:tokens]
        if len(words) >= tokens:
            assert f"[length limit of {tokens} tokens reached: --max-new-tokens raises it]" in together.stderr


def test_an_answer_that_ends_by_itself_has_no_note(built: Path) -> None:
    whole = run(built, "-p", "w1 w2")
    assert "[length limit of 12 tokens reached" in whole.stderr
    stopped = run(built, "-p", "w1 w2", "--stop", whole.stdout.split()[2])
    assert stopped.stdout.split() == whole.stdout.split()[:2]
    assert "length limit" not in stopped.output


def test_plain_decoding_is_timed_over_the_same_requests(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain decoding runs as many steps as the longest answer has tokens, in the same batch."""
    seen: list[tuple[list[SequenceStats], Clock, Clock]] = []

    def record(requests: list[SequenceStats], engine: EngineStats, clock: Clock, plain: Clock) -> None:
        seen.append((requests, clock, plain))

    monkeypatch.setattr("d2sd.cli.generate.show_stats", record)
    assert run(built, "-p", "w1 w2", "-p", "w7", "--policy", "d2sd", "--stats").exit_code == 0
    ((requests, clock, plain),) = seen
    assert plain.steps == 12
    assert clock.steps == max(one.steps for one in requests)


def test_one_engine_has_pools_at_a_time(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `kv_memory: 0.9` the pools of plain decoding would get nine tenths of what the first engine left."""
    pools = list[ref[Any]]()

    def make(*arguments: Any, **options: Any) -> Any:
        assert not any(pool() for pool in pools)
        engine = make_engine(*arguments, **options)
        pools.extend(ref(pool) for pool in engine.runner.pools)
        return engine

    monkeypatch.setattr("d2sd.cli.generate.make_engine", make)
    passed(run(built, "-p", "w1", "--policy", "d2sd", "--stats", "--html", str(tmp_path / "a.html")))
    assert len(pools) == 4, "of target and two drafters, and of the target alone"


def test_the_speedup_is_that_of_whole_answers(capsys: pytest.CaptureFixture[str]) -> None:
    """Nine steps of plain decoding took nine seconds; three of speculation, of two seconds each."""
    one = SequenceStats(Counter({3: 3}), Counter({0: 3}), 24, Counter({"chain": 3}))
    engine = EngineStats(0, 0, 1, 0, 0, 0, 0, 0, 0, 3, "chain")
    show_stats([one], engine, Clock({"prefill": 5.0, "verify": 6.0}, 3), Clock({"prefill": 1.0, "verify": 9.0}, 9))
    text = " ".join(capsys.readouterr().err.split())
    assert "cycle cost │ 2.00" in text
    assert "over that of 9 plain ones, of the same requests" in text
    assert "speedup │ 1.50" in text


def test_statistics_are_shown(built: Path) -> None:
    result = passed(run(built, "-p", "w1", "--stats"))
    for word in ("tau", "accepted by position", "won by", "cycle cost", "rows verified", "prefix hits"):
        assert word in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--temperature", "-1"], "temperature"),
        (["--top-p", "0"], "top_p"),
        (["--max-new-tokens", "100000"], "maximum context length"),
        (["--stop", ""], "stop string is empty"),
    ],
)
def test_bad_requests_are_a_message(built: Path, arguments: list[str], told: str) -> None:
    refused(run(built, "-p", "w1", *arguments), told)


def test_a_missing_drafter_is_named(tmp_path: Path, bundle: Bundle) -> None:
    with pytest.raises(D2SDError, match=r"drafters\.second in its recipe"):
        make_engine(replace(bundle, drafters={DrafterRole.FIRST: bundle.drafters[DrafterRole.FIRST]}), policy="d2sd")


@pytest.mark.slow
def test_a_recipe_may_have_more_requests_than_memory(bundle: Bundle) -> None:
    """K/V for about one and a half requests: the second is preempted, and every answer stays."""
    requests = [chat_request(bundle, f"w{n} w{n + 1}", SamplingParams(seed=n), 40) for n in range(4)]
    answers = [s.answer for s in make_engine(bundle, policy="d2sd").generate(requests)]
    limits = bundle.recipe.limits.model_copy(update={"page_size": 4, "kv_memory": 16 * 4 * 896})
    recipe = bundle.recipe.model_copy(update={"limits": limits})
    tight = replace(bundle, manifest=bundle.manifest.model_copy(update={"recipe": recipe}))
    engine = make_engine(tight, policy="d2sd")
    assert (engine.memory.page_bytes, engine.memory.pages) == (4 * 896, 15)
    sequences = engine.generate(requests)
    assert [s.answer for s in sequences] == answers
    assert sum(s.stats.preemptions for s in sequences) > 0


def test_the_build_records_what_it_proved(bundle: Bundle) -> None:
    figures: Any = bundle.manifest.checks["greedy"]
    for policy in ("chain", "d2sd"):
        assert figures[policy]["equal_to_plain_decoding"] == figures[policy]["prompts"] > 0
        assert figures[policy]["tau"] >= 1


@pytest.mark.slow
def test_a_build_that_would_lose_tokens_fails(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """A walk that accepts whatever was drafted must not get past the check."""

    def careless(tree: Tree, *arguments: Any, **options: Any) -> Accepted:
        """Wrong tokens wherever anything was drafted."""
        accepted = sample_target(tree, *arguments, **options)
        drafted = tree.tokens.shape[1] > 1
        return replace(accepted, tokens=(accepted.tokens + drafted) % 60)

    monkeypatch.setattr("d2sd.runtime.decode.sample_target", careless)
    with pytest.raises(BuildError, match="does not produce the tokens of plain decoding"):
        checks.check_bundle(bundle)


@pytest.mark.slow
def test_the_chat_template_is_asked_what_the_recipe_says(tmp_path: Path) -> None:
    recipe = write_project(tmp_path, target={"path": "target", "template": {"thinking": False}})
    template = "{% if thinking is defined and not thinking %}w9 {% endif %}{{ messages[0].content }}"
    edit_json(tmp_path / "target" / "tokenizer_config.json", "chat_template", template)
    for overrides, expected in (([], (9, 3)), (["--set", "target.template={}"], (3,))):
        out = tmp_path / str(len(overrides))
        succeeds("build", recipe, "--out", out, *overrides)
        assert chat_request(load_bundle(out), "w3", SamplingParams(), 4).prompt == expected


def test_our_own_prompts_are_ours() -> None:
    prompts = read_prompts(OWN_PROMPTS)
    assert len({name for name, _ in prompts}) == len(prompts) >= 24
