"""The program of the process that tries grammars; `trial.py` starts it. It imports nothing of d2sd.

The first line of stdin describes the tokenizer and is answered by "ready"; every other line is a grammar, which is
answered by a line: why it is refused, or "". This process ends with a grammar that takes too much processor time.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

#: Memory that a grammar may take, in bytes of address space; a schema of 1,000 fields takes 43 million.
_MEMORY = 160 << 20
#: Answers that are begun at random, and tokens of each.
_ANSWERS, _TOKENS = 4, 16


def problem(tokenizer: Any, grammar: str, limits: dict[str, Any], slowest: float) -> str:
    """Why a grammar is refused: it does not compile, nothing matches it, or a mask takes more than `slowest` seconds.

    Returns "" for a grammar that is fine as far as the beginnings of some random answers show.
    """
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False, **limits))
    dice, ends = random.Random(0), set(tokenizer.eos_tokens)  # noqa: S311
    for answer in range(_ANSWERS):
        state = matcher.deep_copy()
        for position in range(_TOKENS):
            begun = time.thread_time()
            bits = b"" if state.is_error() else state.compute_bitmask()
            slow = time.thread_time() - begun > slowest
            failed = state.is_error() or not any(bits)
            if failed and answer == position == 0:
                error = str(state.get_error())
                return "no text matches it" if error.startswith("NoExtension") or not error else error
            if slow:
                return f"computing the tokens that may come next takes more than {slowest:g} s"
            token = -1 if failed else _draw(bits, dice, ends)
            if token < 0 or not state.consume_token(token):
                break  # a limit that random text reaches; other text may not
    return ""


def _draw(bits: bytes, dice: random.Random, ends: set[int]) -> int:
    """One of the tokens whose bit is set, but no end token; -1 if there is none."""
    there = [place for place, byte in enumerate(bits) if byte]
    for _ in range(8):
        place = dice.choice(there)
        bit = dice.choice([bit for bit in range(8) if bits[place] >> bit & 1])
        if 8 * place + bit not in ends:
            return 8 * place + bit
    return -1


def _limit_memory() -> None:
    """Let allocations fail, which ends the process, when a grammar takes too much. On Linux only."""
    sizes = Path("/proc/self/statm")
    if sizes.exists():
        used = int(sizes.read_text().split()[0]) * resource.getpagesize()
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY if most < 0 else min(used + _MEMORY, most), most))


def main() -> None:
    """Answer until stdin ends."""
    os.nice(10)  # answers that are being generated come first
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which ends this process
    about = json.loads(sys.stdin.readline())
    tokenizer = LLTokenizer(about["definition"], n_vocab=about["vocab_size"], eos_token=about["end_tokens"])
    _limit_memory()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        grammar, limits, seconds, slowest = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, seconds)  # SIGPROF ends the process, inside llguidance too
        reason = problem(tokenizer, grammar, limits, slowest)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(json.dumps(reason) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
