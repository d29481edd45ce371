"""A small byte-level BPE tokenizer over JSON, as fast tokenizers of real models are, and models with its vocabulary."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from d2sd.runtime.grammar.guidance import GuidanceTokenizer
from d2sd.runtime.model_runner import ModelRunner
from tests.tiny import of_case, runner_of, tiny_decoder, tiny_drafter, tiny_flex

END, SPECIAL = 2, 1
#: Ids that the models have and the tokenizer does not.
EXTRA = 5

_TEXTS = [
    '{"name": "Ann", "age": 31, "tags": ["a", "b"]}',
    '{"city": "Rome", "open": true, "size": null}',
    "[1, 2, 3]",
    "yes no maybe red green blue",
    "2024-01-31",
    '{"name":"get_weather","arguments":{"city":"Oslo"}}',
]


@cache
def tokenizer() -> Any:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=310,
        special_tokens=["<pad>", "<special>", "<end>"],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    made.train_from_iterator(_TEXTS * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")


#: Words of models that think and call tools, which are tokens and text.
WORDS = ("<think>", "</think>", "<tool_call>", "</tool_call>")


@cache
def worded_tokenizer() -> Any:
    """The same tokenizer with WORDS, as Qwen3's has them."""
    made = copy.deepcopy(tokenizer())
    made.add_tokens([AddedToken(word, special=False) for word in WORDS])
    return made


@cache
def vocab_size() -> int:
    return len(tokenizer()) + EXTRA


@cache
def guidance() -> GuidanceTokenizer:
    return GuidanceTokenizer(tokenizer(), frozenset({END}), vocab_size())


def runner(seed: int = 0, case: str = "") -> ModelRunner:
    target = tiny_decoder("qwen3", layers=2, vocab=vocab_size(), seed=seed)
    first = tiny_drafter(target.config, block_size=5, layers=1)
    second = tiny_drafter(target.config, block_size=5, layers=1, role="variable_prefix", seed=2)
    return runner_of(target, *of_case(case, first, second, tiny_flex(target, block_size=5)))


def ids(text: str) -> tuple[int, ...]:
    return tuple(tokenizer()(text).input_ids)


def text_of(tokens: list[int]) -> str:
    text: str = tokenizer().decode(tokens, skip_special_tokens=True)
    return text
