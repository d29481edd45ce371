"""Callers of the engine see endings, streams, cancellation and refusals."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from d2sd.errors import RequestError
from d2sd.policies import PolicyName
from d2sd.recipe import Limits as RecipeLimits
from d2sd.runtime.engine import Engine
from d2sd.runtime.request import Limits, Request
from d2sd.runtime.sampling_params import SamplingParams
from d2sd.runtime.sequence import Output
from tests.runtime.helpers import (
    BLOCK,
    BUDGET,
    all_pages,
    cheater,
    expected,
    free_pages,
    honest,
    make_engine,
    plain,
    run_staggered,
    some_requests,
)

POLICIES: tuple[PolicyName, ...] = ("off", "lookup", "chain", "d2sd", "hybrid")


def letters(ids: list[int]) -> str:
    """Two letters a token, so that stop strings can begin and end inside one."""
    return "".join(chr(97 + i // 8) + chr(65 + i % 8) for i in ids)


def perfect(request: Request, policy: PolicyName = "chain") -> Engine:
    """Every draft is right: each step commits a whole block, so that endings fall inside one."""
    return make_engine(cheater([request], first_errors=0.0, second_errors=0.0), policy, decode=letters)


def base(kind: int = 0, new: int = 23) -> Request:
    return replace(some_requests()[kind], max_new_tokens=new)


def collect(engine: Engine, request: Request) -> tuple[list[int], str, Output]:
    outputs = list(engine.stream([request]))
    return [t for o in outputs for t in o.tokens], "".join(o.text for o in outputs), outputs[-1]


def ending(request: Request) -> tuple[list[int], str, str]:
    """Tokens, text and finish reason, token by token: the first stop token or string behind `min_tokens` ends it."""
    whole, least = expected(request), request.sampling.min_tokens
    for count in range(1, len(whole) + 1):
        tokens = whole[:count]
        ends = tokens[-1] in request.stop_tokens and count > least
        text = letters(tokens[:-1] if ends and not request.stop_visible else tokens)
        searched = 2 * min(least, count) if count > least else len(text)
        found = [(at, stop) for stop in request.stop if (at := text.find(stop, searched)) >= 0]
        if found:
            at, stop = min(found)
            return tokens, text[: at + len(stop) * request.stop_visible], "stop"
        if ends:
            return tokens, text, "stop"
    return whole, letters(whole), "length"


def ended(dice: random.Random) -> Request:
    """A request of any length, with stops that its text has, a part of one token long or several tokens, and others."""
    request = replace(some_requests()[dice.randrange(5)], max_new_tokens=dice.randrange(1, 2 * BLOCK + 4))
    whole = expected(replace(request, max_new_tokens=2 * BLOCK + 3))
    text, begin = letters(whole), dice.randrange(4 * BLOCK)
    strings = [text[begin : begin + dice.randrange(1, 8)], "never", text[-3:] + "!"]
    return replace(
        request,
        stop=tuple(dice.sample(strings, dice.choice((0, 1, 3)))),
        stop_tokens=frozenset(dice.sample(whole, dice.choice((0, 0, 1, 2)))),
        stop_visible=dice.random() < 0.3,
        sampling=replace(request.sampling, min_tokens=min(request.max_new_tokens, dice.choice((0, 0, 1, BLOCK)))),
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_answers_end_where_a_search_of_their_text_ends_them(policy: PolicyName) -> None:
    """Every draft is right, so that endings fall inside of what a step commits; text is held back and comes out."""
    dice, reasons = random.Random(policy), set[str]()
    for _ in range(12):
        request = ended(dice)
        engine = perfect(request, policy)
        tokens, text, last = collect(engine, request)
        assert (tokens, text, last.finish) == ending(request), request
        reasons.add(str(last.finish))
        assert free_pages(engine) == all_pages(engine)
    assert reasons == {"stop", "length"}


def test_a_stop_string_found_by_the_flush_is_a_stop() -> None:
    """Bytes that make no character hold a text back until the end; what ended it is still the stop string."""
    request = replace(base(1, 1), stop=("END",))
    engine = make_engine(cheater([request]), decode=lambda ids: (b"x END\xe2" * len(ids)).decode(errors="replace"))
    _, text, last = collect(engine, request)
    assert text == "x "
    assert last.finish == "stop"


def test_text_streams_as_it_is_written() -> None:
    requests = some_requests()
    engine = make_engine(cheater(requests), decode=letters, max_batch=3)
    texts: dict[int, str] = {}
    outputs = list(engine.stream(requests))
    for output in outputs:
        texts[output.sequence.id] = texts.get(output.sequence.id, "") + output.text
    assert [texts[i] for i in range(len(requests))] == [letters(expected(r)) for r in requests]
    assert sum(o.finish is not None for o in outputs) == len(requests)
    assert max(len(o.tokens) for o in outputs) == BLOCK
    assert min(len(o.tokens) for o in outputs) >= 1


def test_without_a_decoder_there_is_no_text() -> None:
    request = base()
    assert all(o.text == "" for o in make_engine(cheater([request])).stream([request]))


def test_cancel_while_waiting_and_while_running() -> None:
    requests = some_requests()
    engine = make_engine(cheater(requests), max_batch=4)
    sequences = [engine.submit(r) for r in requests]
    waiting, running = sequences[7], sequences[1]
    for _ in range(2):
        engine.step()
    assert running in engine.scheduler.running
    assert waiting in engine.scheduler.waiting
    held, free = len(running.pages), free_pages(engine)
    engine.cancel(waiting)
    assert free_pages(engine) == free
    engine.cancel(running)
    assert free_pages(engine) == free + held
    got = list(running.answer)
    assert got == expected(requests[1])[: len(got)]
    seen = []
    while engine.busy:
        seen += [o.sequence for o in engine.step()]
    assert waiting not in seen
    assert running not in seen
    assert (waiting.finish, running.finish) == ("cancelled", "cancelled")
    assert running.answer == got
    assert waiting.answer == []
    for request, sequence in zip(requests, sequences, strict=True):
        if sequence not in (waiting, running):
            assert sequence.answer == expected(request)
    assert free_pages(engine) == all_pages(engine)


def test_cancel_in_the_middle_of_a_prompt_and_after_a_preemption() -> None:
    requests = some_requests()
    engine = make_engine(cheater(requests), max_batch=8, pages=16, prefill_chunk=4)
    sequences = [engine.submit(r) for r in requests]
    cancelled: set[int] = set()
    for _ in range(500):
        if not engine.busy:
            break
        engine.step()
        part = [s for s in engine.scheduler.running if s.cached > 0 and s.pending and s.id not in cancelled]
        preempted = [s for s in engine.scheduler.waiting if s.stats.preemptions and s.id not in cancelled]
        for kind in (part, preempted):
            if kind and len(cancelled) < 4:
                engine.cancel(kind[0])
                cancelled.add(kind[0].id)
    assert len(cancelled) == 4
    for request, sequence in zip(requests, sequences, strict=True):
        if sequence.id not in cancelled:
            assert sequence.answer == expected(request)
    assert free_pages(engine) == all_pages(engine)


def test_cancel_what_has_finished_changes_nothing() -> None:
    request = base(0, 3)
    engine = make_engine(cheater([request]))
    (sequence,) = engine.generate([request])
    engine.cancel(sequence)
    engine.cancel(sequence)
    assert sequence.finish == "length"
    assert free_pages(engine) == all_pages(engine)


def test_cancelling_everybody_leaves_an_idle_engine() -> None:
    requests = some_requests()
    engine = make_engine(cheater(requests))
    sequences = [engine.submit(r) for r in requests]
    engine.step()
    for sequence in sequences:
        engine.cancel(sequence)
    assert not engine.busy
    assert engine.step() == []
    assert free_pages(engine) == all_pages(engine)
    assert engine.generate([requests[0]])[0].answer == expected(requests[0])


def test_statistics_count_what_happened() -> None:
    requests = some_requests()
    engine = make_engine(cheater(requests), max_batch=4)
    sequences = engine.generate(requests)
    for sequence in sequences:
        stats = sequence.stats
        assert len(sequence.answer) <= stats.tokens < len(sequence.answer) + BLOCK
        assert stats.verified_nodes == stats.steps * BUDGET
    assert max(s.stats.steps for s in sequences) <= engine.clock.steps <= sum(s.stats.steps for s in sequences)


def test_statistics_of_a_running_engine() -> None:
    engine = make_engine(honest(), "chain", max_batch=2, pages=20)
    for seed in (1, 2, 3):
        engine.submit(Request((5,) * 14, 9, SamplingParams(seed=seed)))
    assert (engine.stats.waiting, engine.stats.running, engine.stats.steps) == (3, 0, 0)
    assert engine.stats.prefix_hit_rate == 0.0
    for _ in range(2):  # the second request waits a step for the pages that the first computes
        engine.step()
    stats = engine.stats
    assert (stats.waiting, stats.running, stats.steps, stats.policy) == (1, 2, 2, str(engine.policy))
    assert (stats.pages_total, stats.pages_used + free_pages(engine)) == (20, 20)
    assert stats.pages_used == 3 + 2 * 2, "three of the prompt for both, and two each for what they write"
    assert (stats.prefix_queried_tokens, stats.prefix_hit_tokens, stats.prefill_tokens) == (26, 12, 14)
    while engine.busy:
        engine.step()
    stats = engine.stats
    assert (stats.waiting, stats.running, stats.pages_used, stats.preemptions) == (0, 0, 0, 0)
    assert (stats.prefix_queried_tokens, stats.prefix_hit_tokens) == (39, 24)
    assert stats.prefix_hit_rate == 24 / 39


def test_recipe_turns_the_prefix_cache_off() -> None:
    assert Limits.of(RecipeLimits()).prefix_cache
    assert not Limits.of(RecipeLimits(prefix_cache=False)).prefix_cache


def test_trace_shows_the_last_step() -> None:
    requests = some_requests()[:3]
    engine = make_engine(cheater(requests))
    engine.record_trace = True
    sequences = tuple(engine.submit(r) for r in requests)
    for _ in range(2):
        before = [list(s.tokens) for s in sequences]
        engine.step()
        trace = engine.trace
        assert trace is not None
        assert trace.sequences == sequences
        for row, (sequence, old) in enumerate(zip(sequences, before, strict=True)):
            count = int(trace.accepted.count[row])
            assert int(trace.tree.tokens[row, 0]) == old[-1]
            assert old + trace.accepted.tokens[row, :count].tolist() == sequence.tokens


def test_trace_is_kept_only_where_asked_for() -> None:
    """A trace holds a step's masks and drafts until the next step."""
    engine = make_engine(honest())
    engine.submit(replace(FINE, max_new_tokens=20))
    traces = []
    for wanted in (False, True, False):
        engine.record_trace = wanted
        engine.step()
        traces.append(engine.trace)
    assert [trace is not None for trace in traces] == [False, True, False]


FINE = Request((1, 2, 3), 4)


@pytest.mark.parametrize(
    ("request_", "where"),
    [
        (replace(FINE, prompt=()), "prompt"),
        (replace(FINE, prompt=(1, 64)), "prompt"),
        (replace(FINE, prompt=(-1, 1)), "prompt"),
        (replace(FINE, max_new_tokens=0), "{max_tokens}"),
        (replace(FINE, max_new_tokens=-3), "{max_tokens}"),
        (replace(FINE, max_new_tokens=62), "{max_tokens}"),
        (replace(FINE, prompt=(1,) * 64), "{prompt}"),
        (replace(FINE, stop=("x",)), "stop"),
    ],
)
def test_refused(request_: Request, where: str) -> None:
    engine = make_engine(honest(), "off")
    with pytest.raises(RequestError) as caught:
        engine.submit(request_)
    assert caught.value.where == where
    assert not engine.busy
    assert free_pages(engine) == all_pages(engine)


def test_refused_stop_strings_and_pages() -> None:
    with pytest.raises(RequestError, match="empty"):
        make_engine(honest(), decode=letters).submit(replace(FINE, stop=("x", "")))
    too_much: list[dict[str, Any]] = [
        {"stop": ("x",) * 65},
        {"stop": ("x", "y" * 1025)},
        {"stop_tokens": frozenset(range(8193))},
    ]
    for refused in too_much:
        with pytest.raises(RequestError, match="too"):
            make_engine(honest(), decode=letters).submit(replace(FINE, **refused))
    make_engine(honest(), decode=letters).submit(
        replace(FINE, stop=("y" * 1024,) * 64, stop_tokens=frozenset(range(8192)))
    )
    engine = make_engine(honest(), pages=2)
    with pytest.raises(RequestError, match="pages"):
        engine.submit(FINE)
    assert not engine.busy


def test_the_longest_request_that_fits_the_context() -> None:
    request = Request(tuple(range(40)), 24, SamplingParams(temperature=1.0, seed=77))
    (sequence,) = make_engine(cheater([request]), max_batch=1).generate([request])
    assert sequence.answer == list(plain(request.prompt, request.sampling, 24 + BLOCK)[:24])


def test_a_refusal_in_the_middle_leaves_the_others() -> None:
    requests = some_requests()[:4]
    engine = make_engine(cheater(requests))
    engine.submit(requests[0])
    with pytest.raises(RequestError):
        engine.submit(replace(FINE, prompt=()))
    sequences = run_staggered(engine, requests[1:], gap=1)
    assert [s.answer for s in sequences] == [expected(r) for r in requests[1:]]
    assert [s.id for s in sequences] == [1, 2, 3]
