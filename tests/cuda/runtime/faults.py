"""Each fault of the stand-in is found, and what is right is not. Run by test_runtime.py."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tools.cuda import guard
from tools.cuda.runtime import Cuda, Fault, cuda_on_cpu
from tools.cuda.runtime.tensors import Held


@pytest.fixture(autouse=True)
def guarded() -> None:
    guard.load(Path(os.environ["D2SD_CUDA_GUARD"]))


@pytest.fixture
def cuda(guarded: None) -> Iterator[Cuda]:
    with cuda_on_cpu() as cuda:
        yield cuda


def on_device(*numbers: float) -> Tensor:
    return torch.tensor(numbers).to("cuda")


def side() -> torch.cuda.Stream:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def captured(run: Callable[[], Tensor], stream: torch.cuda.Stream | None = None) -> tuple[Tensor, torch.cuda.CUDAGraph]:
    graph, stream = torch.cuda.CUDAGraph(), stream or side()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=stream):
        out = run()
    torch.cuda.current_stream().wait_stream(stream)
    return out, graph


# -- what is right -----------------------------------------------------------------------------------------------------


def test_numbers_are_those_of_a_cpu(cuda: Cuda) -> None:
    x = on_device(1, 2, 3)
    assert (x.device.type, str(x.device)) == ("cuda", "cuda:0")
    y = torch.stack([x, x.flip(0)]).to(torch.float64)[:, 1:] @ torch.full((2, 1), 2.0, device="cuda").double()
    y[0] += torch.arange(1, device="cuda:0")
    assert y.tolist() == [[10.0], [6.0]]
    assert int(y.sum()) == 16
    assert y.cpu().device.type == "cpu"


def test_a_stream_that_is_joined(cuda: Cuda) -> None:
    x, stream = on_device(1, 2), side()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        y = x * 2
    torch.cuda.current_stream().wait_stream(stream)
    assert (x + y).tolist() == [3, 6]
    y.record_stream(torch.cuda.current_stream())


def test_a_pinned_buffer_whose_copy_was_waited_for(cuda: Cuda) -> None:
    host, x = torch.zeros(2, pin_memory=True), on_device(0, 0)
    for number in range(3):
        host[:] = torch.full((2,), float(number))
        x.copy_(host, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
        copied.synchronize()
    back = x.to("cpu", non_blocking=True)
    assert back.is_pinned()
    torch.cuda.synchronize()
    assert back.tolist() == [2, 2]


def test_a_graph_computes_when_it_is_replayed(cuda: Cuda) -> None:
    x = on_device(1, 2)
    before = x.clone()
    out, graph = captured(lambda: x.add_(1) * 10)
    assert torch.equal(x, before), "nothing ran"
    graph.replay()
    graph.replay()
    assert out.tolist() == [30, 40]
    x.zero_()
    graph.replay()
    assert out.tolist() == [10, 10]


def test_what_a_graph_made_and_nobody_has_is_overwritten(cuda: Cuda) -> None:
    x, kept = on_device(1.0, 2.0), list[Held]()

    def run() -> Tensor:
        made = x * 2
        assert isinstance(made, Held)
        kept.append(made)
        return kept[0] + 1

    out, graph = captured(run)
    inner = kept[0].value
    graph.replay()
    assert inner.tolist() == [2, 4]
    kept.clear()
    graph.replay()
    assert inner.isnan().all()
    assert out.tolist() == [3, 5]


# -- what is not -------------------------------------------------------------------------------------------------------


def host_reads_before_the_event() -> None:
    on_device(1).to("cpu", non_blocking=True).tolist()


def host_overwrites_what_a_copy_reads() -> None:
    host, x = torch.zeros(1, pin_memory=True), on_device(0)
    x.copy_(host, non_blocking=True)
    host.fill_(1)


def host_reads_an_older_event() -> None:
    x = on_device(1)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record()
    host = x.to("cpu", non_blocking=True)
    copied.synchronize()
    host.tolist()


def pageable_memory_to_the_device() -> None:
    on_device(0).copy_(torch.ones(1), non_blocking=True)


def pageable_memory_from_the_device() -> None:
    torch.ones(1).copy_(on_device(0), non_blocking=True)


def a_stream_that_does_not_wait() -> None:
    x = on_device(1)
    x += 1
    with torch.cuda.stream(side()):
        x * 2


def a_stream_that_is_not_waited_for() -> None:
    x, stream = on_device(1), side()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        x += 1
    x * 2


def a_writer_of_what_another_stream_reads() -> None:
    x, stream = on_device(1), side()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        x * 2
    x.zero_()


def memory_freed_while_another_stream_reads_it() -> None:
    x, stream = on_device(1), side()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        x * 2
    del x


def memory_that_nobody_wrote() -> None:
    torch.empty(3, device="cuda") + 1


def a_replay_beside_the_copy_of_its_inputs() -> None:
    host, x = torch.zeros(1, pin_memory=True), on_device(0)
    _, graph = captured(lambda: x + 1)
    torch.cuda.synchronize()
    other = side()
    other.wait_stream(torch.cuda.current_stream())
    x.copy_(host, non_blocking=True)
    with torch.cuda.stream(other):
        graph.replay()


def a_result_before_the_replay() -> None:
    x = on_device(0)
    out, _graph = captured(lambda: x + 1)
    out.tolist()


def a_result_that_the_next_replay_overwrites() -> None:
    x = on_device(0)
    out, graph = captured(lambda: x + 1)
    graph.replay()
    other = side()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        out * 1
    graph.replay()


def two_graphs_of_a_pool_at_a_time() -> None:
    x, pool, graphs = on_device(0), torch.cuda.graph_pool_handle(), [torch.cuda.CUDAGraph() for _ in range(2)]
    stream = side()
    for graph in graphs:
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            x + 1
    torch.cuda.synchronize()
    graphs[0].replay()
    other = side()
    with torch.cuda.stream(other):
        other.wait_event(torch.cuda.Event())  # type: ignore[no-untyped-call]
        graphs[1].replay()


def a_graph_that_is_gone() -> None:
    x = on_device(0)
    out, graph = captured(lambda: x + 1)
    graph.replay()
    del graph
    out + 1


def an_input_that_is_gone() -> None:
    inputs = [on_device(0)]
    _out, graph = captured(lambda: inputs[0] + 1)
    inputs.clear()
    graph.replay()


def a_capture_that_reads_back() -> None:
    x = on_device(0)
    captured(lambda: x * x.sum().item())


def a_capture_whose_shapes_depend_on_numbers() -> None:
    x = on_device(0)
    captured(lambda: x[x > 0])


def a_capture_that_uploads() -> None:
    x = on_device(0)
    captured(lambda: x + torch.ones(1).to("cuda"))


def a_capture_on_the_default_stream() -> None:
    x = on_device(0)
    captured(lambda: x + 1, torch.cuda.current_stream())


FAULTS = {
    host_reads_before_the_event: "the host reads pinned memory .* which stream 0 may still write",
    host_overwrites_what_a_copy_reads: "the host writes pinned memory .* which stream 0 may still read",
    host_reads_an_older_event: "the host reads pinned memory",
    pageable_memory_to_the_device: "not pinned",
    pageable_memory_from_the_device: "not pinned",
    a_stream_that_does_not_wait: "stream 1 reads .* which stream 0 may still write",
    a_stream_that_is_not_waited_for: "stream 0 reads .* which stream 1 may still write",
    a_writer_of_what_another_stream_reads: "stream 0 writes .* which stream 1 may still read",
    memory_freed_while_another_stream_reads_it: "of stream 0 is freed while stream 1 may use it",
    memory_that_nobody_wrote: "before it was written",
    a_replay_beside_the_copy_of_its_inputs: "stream 2 reads .* which stream 0 may still write",
    a_result_before_the_replay: "of a graph before it was written",
    a_result_that_the_next_replay_overwrites: "writes .* of a graph, which stream 2 may still read",
    two_graphs_of_a_pool_at_a_time: "writes the pool of graphs, which stream 0 may still write",
    a_graph_that_is_gone: "which is gone",
    an_input_that_is_gone: "a graph uses memory that was freed",
    a_capture_that_reads_back: "in a capture",
    a_capture_whose_shapes_depend_on_numbers: "waits for the device in a capture",
    a_capture_that_uploads: "copies between host and device in a capture",
    a_capture_on_the_default_stream: "the default stream",
}


@pytest.mark.parametrize("wrong", FAULTS, ids=lambda wrong: wrong.__name__)
def test_a_fault(wrong: Callable[[], None]) -> None:
    with pytest.raises(Fault, match=FAULTS[wrong]), cuda_on_cpu():
        wrong()


def a_caller_that_goes_on() -> None:
    with suppress(Exception):
        pageable_memory_to_the_device()


def test_a_fault_that_somebody_catches_is_raised_at_the_end() -> None:
    with pytest.raises(Fault, match="not pinned"), cuda_on_cpu():
        a_caller_that_goes_on()
