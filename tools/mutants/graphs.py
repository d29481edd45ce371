"""Mutants of capture, replay and read-back, of static inputs, and of what one step leaves to the next."""

from __future__ import annotations

from tools.mutants.mutant import Mutant, Proof, run

CAPTURE, INPUTS, STEPS, PREFILLS = (
    f"runtime/cuda_graphs/{name}.py" for name in ("capture", "inputs", "steps", "prefills")
)
CONTEXT, STAGING = "runtime/drafting/context.py", "runtime/staging.py"
#: `CudaGraphs` as it is, on the stand-in for CUDA's runtime.
ENGINES = Proof(("tests/cuda/runtime/engines.py", "-m", "not slow"), on_device=True)
RECORDED = run(*(f"tests/runtime/cuda_graphs/test_{name}.py" for name in ("steps", "context", "soak")))
PROMPTS = run("tests/runtime/cuda_graphs/test_prefills.py")
ORDER = run("tests/runtime/drafting/test_order.py")
ELSEWHERE = """
        def elsewhere() -> None:
            with torch.cuda.stream(self._stream):
                graph.replay()

        return out, elsewhere
"""

MUTANTS = [
    Mutant("rows of two owners of a page are written at once", CONTEXT, "self._drops += 1", "pass", ORDER),
    Mutant(
        "rows that a graph left wait behind later drops",
        CONTEXT,
        "queue.push(copied, self._left_drops,",
        "queue.push(copied, self._drops,",
        ORDER,
    ),
    Mutant(
        "features wait in a graph's memory",
        PREFILLS,
        "ContextRows(features.clone(), ",
        "ContextRows(features, ",
        PROMPTS,
    ),
    Mutant(
        "what is left over is rows of the last request",
        PREFILLS,
        "[*inputs.lengths, *[0] * (self._chunks - count), left]",
        "[*inputs.lengths[:-1], inputs.lengths[-1] + left, *[0] * (self._chunks - count), 0]",
        PROMPTS,
    ),
    Mutant(
        "a pass computes the inputs of the one before",
        PREFILLS,
        "        torch._foreach_copy_(self.inputs, staged)\n",
        "",
        PROMPTS,
    ),
    Mutant(
        "passes of more chunks than a graph has take one",
        PREFILLS,
        "if graph is None or len(inputs.lengths) > self._chunks:",
        "if graph is None:",
        PROMPTS,
    ),
    Mutant("H1 the read-back is not waited for", CAPTURE, "            copied()\n", "", ENGINES),
    Mutant(
        "H2 the stream of captures does not wait for the caller's",
        CAPTURE,
        "            self._stream.wait_stream(caller)\n",
        "",
        ENGINES,
    ),
    Mutant(
        "H2 the caller's stream does not wait for that of captures",
        CAPTURE,
        "            caller.wait_stream(self._stream)\n",
        "",
        ENGINES,
    ),
    Mutant("H3 the replay is on another stream", CAPTURE, "        return out, graph.replay\n", ELSEWHERE, ENGINES),
    Mutant("the event is not recorded", CAPTURE, "            done.record()\n", "", ENGINES),
    Mutant("the copy to the host waits", CAPTURE, '.to("cpu", non_blocking=True)', '.to("cpu")', ENGINES),
    Mutant(
        "the graph is captured on the caller's stream",
        CAPTURE,
        "torch.cuda.graph(graph, self._pool, self._stream,",
        "torch.cuda.graph(graph, self._pool, caller,",
        ENGINES,
    ),
    Mutant("H4 one pinned buffer", INPUTS, "for _ in range(2)])", "for _ in range(1)])", ENGINES),
    Mutant("H5 buffers are not pinned", INPUTS, 'pin_memory=device.startswith("cuda")', "pin_memory=False", ENGINES),
    Mutant("columns of a wider page table stay", INPUTS, "part[:, columns : host.columns] = 0", "pass", RECORDED),
    Mutant(
        "the copy of the inputs waits",
        INPUTS,
        "self._device.copy_(host.whole, non_blocking=True)",
        "self._device.copy_(host.whole)",
        ENGINES,
    ),
    Mutant(
        "a buffer of a prompt is written before its last copy is done",
        STAGING,
        "        self._copied[self._turn]()\n",
        "",
        ENGINES,
    ),
    Mutant(
        "the mark is set before the copy of a prompt",
        STAGING,
        "        device.copy_(host, non_blocking=True)\n        self._copied[self._turn] = self._mark()\n",
        "        self._copied[self._turn] = self._mark()\n        device.copy_(host, non_blocking=True)\n",
        ENGINES,
    ),
    Mutant("buffers of prompts are not pinned", STAGING, "pin_memory=pin)", "pin_memory=False)", ENGINES),
    Mutant(
        "buffers of prompts are freed before their copies are done",
        STAGING,
        "        for wait in self._copied:\n            wait()\n",
        "",
        ENGINES,
        survives="the allocator of pinned memory waits for copies itself: PyTorch records them",
    ),
    Mutant("late rows are rows of any step", INPUTS, "late=earlier_row >= 0", "late=earlier_row >= -1", RECORDED),
    Mutant("an answer is one token longer", INPUTS, "request.max_new_tokens - 1", "request.max_new_tokens", RECORDED),
    Mutant("the device knows no stop token", INPUTS, "[: STOP_TOKENS - 1]", "[:0]", RECORDED),
    Mutant("H8 rows are queued without a copy", CONTEXT, "map(torch.clone, left", "map(torch.detach, left", RECORDED),
    Mutant(
        "H9 rows of the step before last are injected again",
        CONTEXT,
        "            if drafters and not injecting:\n",
        "            if False:\n",
        RECORDED,
    ),
    Mutant(
        "rows behind a shorter path are kept",
        CONTEXT,
        "            self._memory.keep[:requests, length:].zero_()\n",
        "            pass\n",
        RECORDED,
    ),
    Mutant(
        "the state of the last step is lost in a capture",
        STEPS,
        "            self._state.copy_(before)\n",
        "            pass\n",
        RECORDED,
    ),
    Mutant(
        "one graph for all kinds of sampling",
        STEPS,
        "key = (policy, size, sampling.any_sampled, sampling.any_filter)",
        "key = (policy, size)",
        RECORDED,
    ),
    Mutant("one graph for all policies", STEPS, "key = (policy, size, sampling", "key = (size, sampling", RECORDED),
]
