"""transformers without the hub: d2sd never downloads through it and never runs code from a checkpoint."""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType
from typing import Any

from d2sd.errors import CheckpointError


def offline_transformers() -> ModuleType:
    """Import transformers with the hub disabled and without progress bars and log messages."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # read at import
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    module: ModuleType = transformers
    return module


def load_tokenizer(directory: Path) -> Any:
    """Read the tokenizer of a checkpoint folder."""
    try:
        return offline_transformers().AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # transformers and tokenizers raise errors of any type
        raise CheckpointError("The tokenizer cannot be read.", where=directory, found=error) from None
