"""Decoding that asks the tokenizer's library directly gives transformers' own text."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from d2sd.convert.checkpoint.offline import load_tokenizer

TEXTS = ["Hello , world ! It 's fine .", "naïve café — 東京 🙂", "def f(x):\n    return x ** 2\n"] * 20


def byte_pairs() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def words() -> Tokenizer:
    names = {word: number for number, word in enumerate(["<end>", "Hello", ",", "world", "!", "'s"])}
    tokenizer = Tokenizer(models.WordLevel(names, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def loaded(folder: Path, tokenizer: Tokenizer, **settings: Any) -> Any:
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", **settings).save_pretrained(folder)
    return load_tokenizer(folder)


@pytest.mark.parametrize("cleans", [False, True])
def test_byte_pairs_are_decoded_as_by_transformers(tmp_path: Path, cleans: bool) -> None:
    """Unfinished characters and special tokens too."""
    tokenizer = loaded(tmp_path, byte_pairs(), clean_up_tokenization_spaces=cleans)
    assert tokenizer._plain
    draw, size = random.Random(0), len(tokenizer)
    for length in range(40):
        ids = [draw.randrange(size) for _ in range(length)]
        for skip in (True, False):
            expected = PreTrainedTokenizerFast.decode(tokenizer, ids, skip_special_tokens=skip)
            assert tokenizer.decode(ids, skip_special_tokens=skip) == expected
    for text in TEXTS[:3]:
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == tokenizer.decode(torch.tensor(ids)) == text
        assert tokenizer.decode([ids, ids]) == [text, text]


def test_spaces_are_removed_where_transformers_does(tmp_path: Path) -> None:
    tokenizer = loaded(tmp_path, words(), clean_up_tokenization_spaces=True)
    assert not tokenizer._plain
    assert tokenizer.decode([1, 2, 3, 4]) == "Hello, world!"


def test_a_class_of_its_own_decodes_as_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Shouting(PreTrainedTokenizerFast):  # type: ignore[misc]
        def _decode(self, *arguments: Any, **options: Any) -> Any:
            return super()._decode(*arguments, **options).upper()

    shouting = Shouting(tokenizer_object=words(), eos_token="<end>")
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda *_, **__: shouting)
    tokenizer = load_tokenizer(tmp_path)
    assert not tokenizer._plain
    assert tokenizer.decode([1, 3]) == "HELLO WORLD"
