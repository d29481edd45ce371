"""transformers without the hub: d2sd never downloads through it and never runs code from a checkpoint."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import ModuleType
from typing import Any

from d2sd.errors import CheckpointError, RequestError
from d2sd.io import read_json
from d2sd.panics import panics_as

#: No vocabulary comes near it. The tokenizers library prints every id that is missing below the largest.
_MAX_ID = 1 << 24
#: Characters of a special token; the library takes seconds for each of 100,000.
_MAX_TOKEN = 4096


def offline_transformers() -> ModuleType:
    """Import transformers with the hub disabled and without progress bars and log messages."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # read at import
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    import transformers
    from huggingface_hub import constants

    constants.HF_HUB_OFFLINE = True  # where `d2sd pull` has imported it before

    logging: Any = transformers.utils.logging  # its functions have no types
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    module: ModuleType = transformers
    return module


class _Panicking:
    """Mixed into the class of a tokenizer: a text or token ids that its Rust code cannot bear are the caller's error.

    A regular expression of a checkpoint, for one, may need more tries than its engine allows.
    """

    #: Whether the text of tokens is what its library says: asked directly, that takes a quarter of the time, and a
    #: server asks twice for every token.
    _plain = False

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        with panics_as(RequestError, "The target's tokenizer fails on this text.", where="{prompt}"):
            return super().__call__(*arguments, **options)  # type: ignore[misc]

    def decode(self, tokens: Any, skip_special_tokens: bool = False, **options: Any) -> Any:
        """The text of token ids."""
        with panics_as(RequestError, "The target's tokenizer fails on these tokens.", where="tokens"):
            if self._plain and type(tokens) is list and not options and (not tokens or type(tokens[0]) is int):
                return self._tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)  # type: ignore[attr-defined]
            return super().decode(tokens, skip_special_tokens, **options)  # type: ignore[misc]


def load_tokenizer(directory: Path) -> Any:
    """Read the tokenizer of a checkpoint folder, and try it. Raises `CheckpointError`."""
    _check_ids(directory / "tokenizer.json")
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        _check_special_tokens(directory / name)
    try:
        with panics_as(CheckpointError, "The tokenizer cannot be read.", where=directory):
            tokenizer = offline_transformers().AutoTokenizer.from_pretrained(
                directory, local_files_only=True, trust_remote_code=False
            )
        plain = {"_plain": _decodes_plainly(tokenizer)}
        tokenizer.__class__ = type(type(tokenizer).__name__, (_Panicking, type(tokenizer)), plain)
        _try(tokenizer)
        return tokenizer
    except Exception as error:  # transformers and tokenizers raise errors of any type
        raise CheckpointError("The tokenizer cannot be read.", where=directory, found=error) from None


def _decodes_plainly(tokenizer: Any) -> bool:
    """Whether transformers adds nothing to what the tokenizer's library decodes.

    Spaces before punctuation are not removed from the text of a byte-pair tokenizer, whatever its config says, in
    versions of transformers that have a switch for it.
    """
    fast, cleans = offline_transformers().PreTrainedTokenizerFast, bool(tokenizer.clean_up_tokenization_spaces)
    if cleans and isinstance(tokenizer, fast) and type(tokenizer.backend_tokenizer.model).__name__ == "BPE":
        cleans = getattr(tokenizer, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", True)
    return isinstance(tokenizer, fast) and type(tokenizer)._decode is fast._decode and not cleans


def _try(tokenizer: Any) -> None:
    """Use everything that d2sd asks of a tokenizer: settings of a wrong type are read without complaint.

    Raises errors of any type.
    """
    for special in (True, False):
        tokenizer.decode(tokenizer("a", add_special_tokens=special).input_ids)
    templates = tokenizer.chat_template or ""
    for template in templates.values() if isinstance(templates, dict) else [templates]:
        if not isinstance(template, str):
            raise TypeError(f"chat_template is of type {type(template).__name__}, not text")
    json.dumps(tokenizer.special_tokens_map, default=str)


def _check_ids(file: Path) -> None:
    """Raise CheckpointError for a token id so large that it must be damage."""
    values = read_json(file, error=CheckpointError, what="tokenizer") if file.is_file() else None
    added, model = (values.get(key) if isinstance(values, dict) else None for key in ("added_tokens", "model"))
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids = [*vocabulary.values()] if isinstance(vocabulary, dict) else []
    ids += [token.get("id") for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    if too_large := [number for number in ids if isinstance(number, int) and number >= _MAX_ID]:
        raise CheckpointError(
            "A token id is out of range.", where=file, found=too_large[0], expected=f"below {_MAX_ID:,}"
        )


def _check_special_tokens(file: Path) -> None:
    """Raise CheckpointError for a special token so long that it must be damage."""
    values = read_json(file, error=CheckpointError, what="tokenizer") if file.is_file() else None
    pending = [value for name, value in values.items() if "token" in name] if isinstance(values, dict) else []
    while pending:
        entry = pending.pop()
        if isinstance(entry, str) and len(entry) > _MAX_TOKEN:
            raise CheckpointError(
                "A special token is too long.",
                where=file,
                found=f"{len(entry):,} characters: {entry[:20]}...",
                expected=f"at most {_MAX_TOKEN:,}",
            )
        if isinstance(entry, dict | list):
            pending += entry.values() if isinstance(entry, dict) else entry
