"""How tests reach a consumer: it runs in an environment of its own, over a child script, folders and tensors.

`make consumers` makes the environments and sets D2SD_<CONSUMER>_PYTHON to their interpreters.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from d2sd.modeling.decoder import Decoder
from d2sd.modeling.drafters.dflash import Drafter
from tests.convert.formats.helpers import draft_hidden, draft_logits
from tests.tiny import full_logits, random_tokens

ANCHOR = 9  # the place of a block's first token
#: A token before each slot of a block of four.
PARENTS = torch.tensor([7, 30, 7, 51])
#: Of logits that spread by about 3, behind nine layers in fp32 whose sums are in another order; what is wrong is off by
#: tenths.
TOLERANCE = 1e-4


def python_of(consumer: str) -> str | None:
    """The interpreter of the consumer's environment, where one is named."""
    return os.environ.get(f"D2SD_{consumer.upper()}_PYTHON")


def needs(consumer: str) -> pytest.MarkDecorator:
    """Skip where the consumer's environment is not named."""
    reason = f"D2SD_{consumer.upper()}_PYTHON names no environment: make consumers"
    return pytest.mark.skipif(python_of(consumer) is None, reason=reason)


def run_child(consumer: str, script: str, *arguments: object) -> None:
    """Run a child script of this folder in the consumer's environment."""
    run(python_of(consumer), Path(__file__).with_name(script), *arguments)


def run(*command: object) -> None:
    """Run a command without a hub."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run([str(w) for w in command], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def prompt(decoder: Decoder) -> Tensor:
    """[20] tokens, of which the one at ANCHOR is what the target says behind those before it."""
    tokens = random_tokens(decoder, 1, 20)[0]
    tokens[ANCHOR] = full_logits(decoder, tokens[None, :ANCHOR])[0, -1].argmax()
    return tokens


def write_prompt(file: Path, decoder: Decoder) -> Path:
    """Write the prompt for a child: `tokens`, `anchor` for ANCHOR, and `parents` for a head."""
    save_file({"tokens": prompt(decoder), "anchor": torch.tensor(ANCHOR), "parents": PARENTS}, file)
    return file


def expected_logits(decoder: Decoder, drafter: Drafter) -> Tensor:
    """Ours of the block behind the prompt: [G, Vd]."""
    tokens = prompt(decoder)
    return draft_logits(decoder, drafter, tokens[:ANCHOR], int(tokens[ANCHOR]))


def expected_added(decoder: Decoder, drafter: Drafter) -> Tensor:
    """Ours, to those logits behind PARENTS: [G, Vd]."""
    tokens = prompt(decoder)
    hidden = draft_hidden(decoder, drafter, tokens[:ANCHOR], int(tokens[ANCHOR]))
    ids = torch.arange(drafter.config.vocab_size) if drafter.draft_ids is None else drafter.draft_ids
    assert drafter.head is not None
    return drafter.head.added(hidden, PARENTS[:, None], ids.expand(len(hidden), -1))[:, 0]
