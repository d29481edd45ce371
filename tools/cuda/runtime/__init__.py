"""A CUDA runtime without a GPU: the product's own streams, events, copies and graphs, on memory of the CPU.

    with cuda_on_cpu() as cuda:
        x = cuda.upload(torch.ones(3))  # a tensor on `cuda:0` that has numbers
        host = x.to("cpu", non_blocking=True)
        torch.cuda.current_stream().synchronize()  # without it, reading `host` is a Fault

What runs inside sees `torch.cuda` as on a GPU. Every operator is executed at once, in the order of the host, so numbers
are those of a CPU. Whether a GPU could have run them in another order is decided by happens-before (order.py): host and
streams are actors with vector clocks, and two accesses to one memory, one of which writes it, must be ordered by
launches, events or waits. Memory of graphs is what the caching allocator promises of it (graphs.py).

Faults: memory that another actor may still write, or still read; memory that is freed while a stream other than its own
may use it; copies that do not wait and whose host memory is not pinned; a capture that waits, or runs what is not
captured; a graph that uses memory that was freed, whose results are read before it ran, or which is gone; memory that
is read before it was written.

Not modelled: several devices, several host threads (one actor), parts of an allocation (all of it is used), events that
are recorded inside a capture.
"""

from tools.cuda.runtime.order import Fault
from tools.cuda.runtime.patches import cuda_on_cpu
from tools.cuda.runtime.tensors import Cuda

__all__ = ["Cuda", "Fault", "cuda_on_cpu"]
