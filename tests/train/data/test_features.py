"""The target's features of every answer are kept or computed anew; another run keeps a part of a cache."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from d2sd.errors import D2SDError
from d2sd.train.data.features import TrainingData, TrainingSequence, cache_features, online_features
from d2sd.train.data.responses import Response
from tests.tiny import random_tokens
from tests.train.helpers import TAPS, VOCAB, Killed, exact_features, greedy_responses, target


def random_responses(count: int, seed: int = 0) -> list[Response]:
    tokens = random_tokens(target(), count, 7, seed).tolist()
    return [Response(f"r{i}", ids[: 2 + i % 3], ids[2 + i % 3 :]) for i, ids in enumerate(tokens)]


def killed_after(count: int) -> Callable[[int], None]:
    done = 0

    def advance(finished: int) -> None:
        nonlocal done
        done += finished
        if done >= count:
            raise Killed

    return advance


def fill(
    path: Path, answers: list[Response], aux_layer_ids: tuple[int, ...] = TAPS
) -> tuple[TrainingData, list[int], int]:
    """The cache, what was reported, and how often the target ran."""
    told: list[int] = []
    runs: list[object] = []
    hook = target().register_forward_hook(lambda *args: runs.append(None))
    cache = cache_features(target(), aux_layer_ids, answers, path, told.append)
    hook.remove()
    return cache, told, len(runs)


def sequences(cache: TrainingData) -> list[TrainingSequence]:
    return [cache[index] for index in range(len(cache))]


def held(cache: TrainingData) -> Tensor:
    return torch.cat([torch.cat([s.features, s.hidden], -1) for s in sequences(cache)])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "features.bf16"


def test_cache_equals_the_targets_own_pass(path: Path) -> None:
    answers = greedy_responses()
    cache, told, runs = fill(path, answers)
    assert (sum(told), runs, len(cache)) == (4, 4, 4)
    exact = sequences(exact_features(answers))
    for found, expected, answer in zip(sequences(cache), exact, answers, strict=True):
        assert found.tokens.tolist() == answer.prompt_ids + answer.response_ids
        assert found.prompt_length == len(answer.prompt_ids)
        assert found.features.dtype == found.hidden.dtype == torch.bfloat16
        for part in ("features", "hidden"):
            torch.testing.assert_close(getattr(found, part).float(), getattr(expected, part), rtol=2**-8, atol=1e-6)
        # Row t says what follows token t: on a greedy answer that is the next token.
        said = target().logits(expected.hidden).argmax(-1)
        assert said[found.prompt_length - 1 : -1].tolist() == answer.response_ids


def test_a_second_run_runs_nothing_unless_the_cache_was_deleted(path: Path) -> None:
    answers = random_responses(60)
    first = held(fill(path, answers)[0]).clone()
    for runs_then in (0, 60):
        cache, told, runs = fill(path, answers)
        assert (sum(told), runs) == (60, runs_then)
        assert torch.equal(held(cache), first)
        path.unlink()


@pytest.mark.slow
def test_a_killed_run_is_resumed(path: Path, tmp_path: Path) -> None:
    """State is kept every 50 sequences: of 70 done, 50 are not computed again."""
    answers = random_responses(120)
    with pytest.raises(Killed):
        cache_features(target(), TAPS, answers, path, killed_after(70))
    cache, told, runs = fill(path, answers)
    assert told[0] == 50
    assert (sum(told), runs) == (120, 70)
    assert torch.equal(held(cache), held(fill(tmp_path / "other", answers)[0]))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("changed", ["tokens", "order", "aux_layer_ids", "shorter", "longer"])
def test_other_data_starts_over(path: Path, tmp_path: Path, changed: str) -> None:
    """Also data of the very same size."""
    answers, aux_layer_ids = random_responses(60), TAPS
    fill(path, answers)
    if changed == "tokens":
        answers = random_responses(60, seed=1)
    elif changed == "order":
        answers = answers[3:] + answers[:3]
    elif changed == "aux_layer_ids":
        aux_layer_ids = (0, 2)
    else:
        answers = answers[:55] if changed == "shorter" else answers + random_responses(2, seed=2)
    cache, told, runs = fill(path, answers, aux_layer_ids)
    assert (sum(told), runs) == (len(answers), len(answers))
    assert torch.equal(held(cache), held(fill(tmp_path / "other", answers, aux_layer_ids)[0]))


def test_what_was_begun_over_is_not_taken_for_what_it_was(path: Path) -> None:
    """Other data, interrupted before it was noted anywhere, has overwritten the first rows."""
    answers = random_responses(60)
    first = held(fill(path, answers)[0]).clone()
    told: list[int] = []

    def killed(count: int) -> None:
        told.append(count)
        if len(told) > 10:
            raise Killed

    with pytest.raises(Killed):
        cache_features(target(), TAPS, random_responses(60, seed=1), path, killed)
    cache, _, runs = fill(path, answers)
    assert runs == 60
    assert torch.equal(held(cache), first)


def test_a_full_disk_is_an_error_before_anything_runs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the space reserved, writing to the mapped file would end the process with SIGBUS."""
    asked: list[int] = []

    def full(descriptor: int, offset: int, size: int) -> None:
        asked.append(offset + size)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space"):
        fill(path, random_responses(3))
    assert asked == [3 * 7 * 3 * 32 * 2]  # sequences, tokens, two aux_layer_ids and the final state, hidden, bf16


def test_parts_of_a_cache() -> None:
    cache = exact_features(greedy_responses())
    first, rest = cache.split(1)
    assert (len(first), len(rest)) == (1, 3)
    assert [first.name(0), rest.name(0), rest.name(2)] == ["a0", "a1", "a3"]
    assert torch.equal(torch.cat([held(first), held(rest)]), held(cache))
    middle, last = rest.split(2)
    assert torch.equal(torch.cat([held(first), held(middle), held(last)]), held(cache))
    with pytest.raises(IndexError):
        first[1]


def test_holding_out_everything_is_refused() -> None:
    for count in (4, 5):
        with pytest.raises(D2SDError, match=r"held_out(.|\n)*4 responses(.|\n)*more than"):
            exact_features(greedy_responses()).split(count)


# --- Computed when asked ---------------------------------------------------------------------------------------------


def test_online_features_are_the_targets_own_pass() -> None:
    """Exactly those a cache would hold, before it rounds them, and computed only when asked."""
    answers, runs = greedy_responses(), list[object]()
    hook = target().register_forward_hook(lambda *args: runs.append(None))
    data = online_features(target(), TAPS, answers)
    assert not runs
    found = sequences(data)
    assert len(runs) == 4
    hook.remove()
    for mine, exact in zip(found, sequences(exact_features(answers)), strict=True):
        assert torch.equal(mine.tokens, exact.tokens)
        assert mine.prompt_length == exact.prompt_length
        assert not mine.features.requires_grad
        torch.testing.assert_close(mine.features, exact.features)
        torch.testing.assert_close(mine.hidden, exact.hidden)


# --- About the data --------------------------------------------------------------------------------------------------


def test_a_digest_knows_every_token_and_their_order() -> None:
    """But not where features come from, nor which ids the answers have."""
    answers = random_responses(3)
    plain = exact_features(answers).digest
    assert online_features(target(), TAPS, answers).digest == plain
    moved = [Response(answers[0].id, answers[0].prompt_ids[:1], answers[0].prompt_ids[1:] + answers[0].response_ids)]
    others = [answers[::-1], answers[:2], random_responses(3, seed=1), moved + answers[1:]]
    assert len({plain, *(exact_features(other).digest for other in others)}) == 5
    assert exact_features(answers[:2]).digest == exact_features(answers).split(2)[0].digest


def test_frequent_ids() -> None:
    """Only answers count; of equally frequent ids the lowest is taken; a part counts its own."""
    answers = [Response("x", [4, 4, 4], [7, 7, 7, 5, 5, 9]), Response("y", [4], [2, 9, 3])]
    data = TrainingData(answers, 1, lambda number: torch.zeros(6, 64))

    def ids(part: TrainingData, count: int) -> list[int]:
        chosen = part.frequent(count, VOCAB)
        assert chosen.shape == (VOCAB,)
        return chosen.nonzero()[:, 0].tolist()

    assert ids(data, 3) == [5, 7, 9]
    assert ids(data, 4) == [2, 5, 7, 9]
    assert ids(data, 6) == [0, 2, 3, 5, 7, 9], "as many as asked for, seen or not"
    assert ids(data.split(1)[1], 3) == [2, 3, 9]
    assert len(ids(data, 999)) == VOCAB
