"""A stand-in for TensorRT-LLM's Eagle3 dynamic-tree path on a CPU, in our words: what its sources say that it does.

It proves that d2sd's pieces fit this reading, not that TensorRT-LLM is like it; `make trtllm-sources FROM=folder` puts
TensorRT-LLM's own files in its place, one by one.

    ops.py        the custom operators: acceptance, compaction of K/V
    slots.py      `DynamicTreeSlotStorage` and its manager
    metadata.py   what attention reads, with both layouts of the mask
    worker.py     the worker whose hooks d2sd overrides
    modules.py    the modules of the package, registries and the loading of a draft model
    batcher.py    contexts in chunks, generations, slots, paged K/V: requests in flight around one worker
"""
