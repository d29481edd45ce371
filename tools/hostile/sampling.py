"""Parameters of sampling and of the end of an answer that cost the engine's thread, or that overflow."""

from __future__ import annotations

import json
import random
from typing import Any

from tools.hostile.case import CHAT, WORDS, Case, Kind, Scene, letters, size


def _stop_long(draw: random.Random, scene: Scene) -> Case:
    """A few very long stop strings, most of one letter: each of their prefixes may be what the text ends with."""
    unit = draw.choice(("a", " ", "ab", "\n", "é", "🙂", letters(draw, 40)))
    length = draw.choice((size(draw, 20_000, 3_500_000), draw.randint(2_000_000, 3_500_000)))
    long = unit * (length // len(json.dumps(unit)))
    return Case.of(scene.completion(draw, stop=draw.choice((long, [long], [long, "zz"], [long + "b", long + "c"]))))


def _stop_many(draw: random.Random, scene: Scene) -> Case:
    """Many stop strings that begin alike."""
    unit, count = draw.choice("a e\n"), size(draw, 20, 3000)
    overlapping = [unit * n + draw.choice(("b", "", "zz")) for n in range(1, count)]
    random_ones = [letters(draw, draw.randint(3, 60)) for _ in range(10 * count)]
    return Case.of(scene.completion(draw, stop=draw.choice((overlapping, random_ones))))


def _bad_words(draw: random.Random, scene: Scene) -> Case:
    """Many bad words and a long one: as a table, entries times the longest word."""
    long = (draw.choice(WORDS[:9]) + " ") * size(draw, 500, 40_000)
    many = [f"{draw.choice(WORDS)}{n}" for n in range(size(draw, 200, 60_000))]
    return Case.of(
        scene.completion(
            draw,
            bad_words=draw.choice(
                ([long, *many], many, [long] * 8, [*many, long], ["\ud800"], ["\x00", "\ufffd", " "])
            ),
        )
    )


def _logit_bias(draw: random.Random, scene: Scene) -> Case:
    """A bias for every token, alone or beside a long bad word."""
    count = min(scene.vocab, size(draw, 300, 200_000))
    bias = {str(token): draw.choice((-100, -1, 0, 0.5, 100)) for token in draw.sample(range(scene.vocab), count)}
    extra: dict[str, Any] = draw.choice(({}, {"bad_words": ["cat " * size(draw, 100, 3000)]}, {"n": 4}))
    return Case.of(scene.completion(draw, logit_bias=bias, **extra))


def _stop_tokens(draw: random.Random, scene: Scene) -> Case:
    """Many stop tokens, inside the vocabulary and far outside, before which min_tokens holds."""
    count = size(draw, 300, 400_000)
    ids = draw.choice(([*range(count)], [draw.randrange(2**40) for _ in range(count)], [scene.vocab - 1] * count))
    return Case.of(scene.completion(draw, stop_token_ids=ids, min_tokens=scene.answer, ignore_eos=True))


def _prompt_logprobs(draw: random.Random, scene: Scene) -> Case:
    """Log-probabilities of long prompts with many answers."""
    length = scene.context // draw.choice((4, 8, 16))
    prompts = [[draw.randrange(scene.vocab) for _ in range(length)] for _ in range(draw.choice((1, 2, 8)))]
    body = scene.completion(draw, prompt=prompts, prompt_logprobs=20, n=draw.choice((1, 4)), max_tokens=1)
    return Case.of(body | {"logprobs": draw.choice((None, 20))})


def _logprobs(draw: random.Random, scene: Scene) -> Case:
    """Log-probabilities of every token, with as many alternatives as there may be and more."""
    count = draw.choice((0, 5, 20, 21, 2**31))
    if draw.random() < 0.5:
        return Case.of(scene.completion(draw, logprobs=count, n=draw.randint(1, 4)))
    return Case.of(scene.chat(draw, logprobs=True, top_logprobs=count, n=draw.randint(1, 4)), CHAT)


def _overflow(draw: random.Random, scene: Scene) -> Case:
    """Penalties and temperatures at the edge of what fp32 holds, beside filters that subtract."""
    edges = {
        "repetition_penalty": (1e-300, 1e-40, 1e-38, 1e-20, 1e-5, 0.01, 100, 1e308, 10.0 ** draw.uniform(-60, 2)),
        "temperature": (0, 1e-300, 1e-30, 1e-6, 1, 99.99, 10.0 ** draw.uniform(-40, 2)),
        "min_p": (0, 1e-300, 0.1, 1.0, draw.random()),
        "top_p": (1e-300, 1e-9, 0.5, 1.0, draw.random()),
        "top_k": (-1, 0, 1, 2**31 - 1, draw.randrange(100)),
        "presence_penalty": (-2, 2, draw.uniform(-2, 2)),
        "frequency_penalty": (-2, 2, draw.uniform(-2, 2)),
        "seed": (0, 2**63, 2**64 - 1, draw.randrange(2**64)),
    }
    poison = {name: draw.choice(edges[name]) for name in draw.sample([*edges], draw.randint(2, len(edges)))}
    bias = {"logit_bias": {str(draw.randrange(scene.vocab)): draw.choice((-100, 100))}} if draw.random() < 0.3 else {}
    return Case.of(scene.completion(draw, temperature=1.0) | {"max_tokens": 4 * scene.answer} | poison | bias)


def _neighbour(draw: random.Random, scene: Scene) -> Case:
    """One half of a pair: logits that overflow, and a filter of another request that must not touch them."""
    if draw.random() < 0.5:
        poison: dict[str, Any] = {
            "repetition_penalty": draw.choice((1e-40, 1e-39, 3e-38, 10.0 ** draw.uniform(-45, -3)))
        }
    else:
        poison = draw.choice(({"min_p": draw.uniform(0.01, 0.5)}, {"top_p": draw.uniform(0.1, 0.9)}, {"top_k": 5}))
    return Case.of(scene.completion(draw, temperature=1.0, max_tokens=3 * scene.answer, ignore_eos=True) | poison)


def _answers(draw: random.Random, scene: Scene) -> Case:
    """Asks for as many answers as there may be, or more."""
    count = draw.choice((64, 127, 128, 129, 2**31))
    if draw.random() < 0.3:
        prompts = [scene.completion(draw)["prompt"] for _ in range(draw.choice((16, 128, 5000)))]
        return Case.of(scene.completion(draw, prompt=prompts, n=draw.randint(1, 8)))
    return Case.of(scene.completion(draw, n=count))


def _priority(draw: random.Random, scene: Scene) -> Case:
    """The highest priority, and numbers outside."""
    priority = draw.choice((-(2**31), -1, 2**31 - 1, 2**31, -(10**30)))
    return Case.of(scene.completion(draw, priority=priority, n=draw.choice((1, 4))))


def _salts(draw: random.Random, scene: Scene) -> Case:
    """A prefix of its own for every request, so that the prefix cache fills with what nobody asks for again."""
    salt = letters(draw, draw.choice((1, 255, 256, 257, 100_000)))
    prompt = [draw.randrange(scene.vocab) for _ in range(scene.context // 16)]
    return Case.of(scene.completion(draw, prompt=prompt, cache_salt=salt))


def _deadline(draw: random.Random, scene: Scene) -> Case:
    """Deadlines that have passed before anything begins, and some that are never reached."""
    deadline = draw.choice((5e-324, 1e-300, 1e-9, 10.0 ** draw.uniform(-6, 0), 1e9, 1e308, 2**63, 10**400))
    return Case.of(scene.completion(draw, deadline=deadline, stream=draw.random() < 0.3))


KINDS = (
    Kind("stop: long", _stop_long),
    Kind("stop: many", _stop_many),
    Kind("bad words", _bad_words),
    Kind("logit_bias", _logit_bias),
    Kind("stop_token_ids", _stop_tokens),
    Kind("prompt_logprobs", _prompt_logprobs, fills=True),
    Kind("logprobs", _logprobs),
    Kind("overflow", _overflow),
    Kind("neighbours' filters", _neighbour),
    Kind("many answers", _answers, fills=True),
    Kind("priority", _priority, fills=True),
    Kind("cache salts", _salts),
    Kind("deadlines", _deadline),
)
