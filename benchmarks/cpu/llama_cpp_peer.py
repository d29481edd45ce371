"""llama.cpp as a contestant: its C API through llama-cpp-python, greedy, with any number of sequences in flight.

    python -m benchmarks.cpu.llama_cpp_peer FILE

decodes a few tokens with all buffer types that llama.cpp has: see `survives`.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cpu.contestant import Key, Limits, Passed, Tokens, Weights

#: A token to compute: its id, position and slot, and whether its logits are needed.
Row = tuple[int, int, int, bool]


#: Python functions of which llama.cpp has the address.
_KEPT: list[object] = []


@cache
def library() -> Any:
    """The C API, without its log."""
    import llama_cpp

    _KEPT.append(llama_cpp.llama_log_callback(lambda *_: None))
    llama_cpp.llama_log_set(_KEPT[-1], None)
    llama_cpp.llama_backend_init()
    return llama_cpp


class LlamaCpp:
    """A model in a GGUF file; requests join and leave the batch at any step."""

    def __init__(self, file: Path, weights: Weights, limits: Limits, *, extra_buffers: bool) -> None:
        """`extra_buffers` lets llama.cpp repack weights for this processor."""
        self.key = Key("llama.cpp", "plain", weights, True)
        api = self._api = library()
        self._limits = limits
        options = api.llama_model_default_params()
        options.use_extra_bufts = extra_buffers
        model = api.llama_model_load_from_file(str(file).encode(), options)
        assert model, file
        self._vocabulary = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
        sizes = api.llama_context_default_params()
        length = -(-limits.length // 256) * 256
        sizes.n_ctx, sizes.n_seq_max, sizes.n_batch = length * limits.in_flight, limits.in_flight, length
        sizes.n_threads = sizes.n_threads_batch = limits.threads
        self._context = api.llama_init_from_model(model, sizes)
        assert self._context, file
        self._batch = api.llama_batch_init(length, 0, 1)

    def answer(self, prompts: Sequence[Tokens]) -> Passed:
        limits, memory = self._limits, self._api.llama_get_memory(self._context)
        self._api.llama_memory_clear(memory, False)
        answers: list[Tokens] = [[] for _ in prompts]
        waiting, running = deque(range(len(prompts))), dict[int, int]()  # slot -> number of the prompt
        steps, prefill, start = 0, 0.0, time.perf_counter()
        while waiting or running:
            for slot in range(limits.in_flight):
                if slot not in running and waiting:
                    began, number = time.perf_counter(), waiting.popleft()
                    prompt = prompts[number]
                    last = len(prompt) - 1
                    answers[number] += self._decode([(token, i, slot, i == last) for i, token in enumerate(prompt)])
                    running[slot] = number
                    prefill += time.perf_counter() - began
            self._release(running, answers, memory)
            if running:
                rows = [
                    (answers[n][-1], len(prompts[n]) + len(answers[n]) - 1, slot, True) for slot, n in running.items()
                ]
                for number, token in zip(running.values(), self._decode(rows), strict=True):
                    answers[number].append(token)
                steps += 1
                self._release(running, answers, memory)
        return Passed(time.perf_counter() - start, prefill, steps, answers)

    def _release(self, running: dict[int, int], answers: Sequence[Tokens], memory: Any) -> None:
        """Free the slots of answers that have ended."""
        for slot, number in list(running.items()):
            answer = answers[number]
            if len(answer) >= self._limits.max_new_tokens or answer[-1] in self._limits.stop_tokens:
                self._api.llama_memory_seq_rm(memory, slot, -1, -1)
                del running[slot]

    def _decode(self, rows: Sequence[Row]) -> Tokens:
        """Compute the rows; the best next token of those whose logits are needed."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for index, (token, position, slot, wanted) in enumerate(rows):
            batch.token[index], batch.pos[index], batch.logits[index] = token, position, wanted
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, slot
        status = self._api.llama_decode(self._context, batch)
        assert status == 0, status
        return [self._best(index) for index, row in enumerate(rows) if row[3]]

    def _best(self, index: int) -> int:
        logits = self._api.llama_get_logits_ith(self._context, index)
        return int(np.ctypeslib.as_array(logits, (self._vocabulary,)).argmax())


@cache
def survives(file: Path) -> bool:
    """Whether llama.cpp can decode this file with its buffers for this processor.

    With AMX the release that we use ends in a segmentation fault on Q4_1, so the attempt is a process of its own.
    """
    command = [sys.executable, "-m", __name__, str(file)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


if __name__ == "__main__":
    attempt = Limits(in_flight=1, max_new_tokens=4, length=256, stop_tokens=frozenset(), threads=2)
    LlamaCpp(Path(sys.argv[1]), "Q4_1", attempt, extra_buffers=True).answer([list(range(100, 164))])
