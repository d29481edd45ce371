"""Two drafters inside TensorRT-LLM's PyTorch flow. NOT YET RUN: nobody here had TensorRT-LLM, or a GPU for it.

Registered: DFlash mode with both drafters, verified as one chain by TensorRT-LLM's own acceptance. At the likeliest
rejection boundary of the first draft, the second drafter drafts again after the kept prefix. TensorRT-LLM commits the
target's tokens only, whatever is drafted, and no K/V of the target is touched here.

Not registered: D²SD's tree. In TensorRT-LLM a DFlash step is a chain of max_draft_len + 1 tokens, for its argument
class, its sampler and its K/V rewind alike; trees exist for Eagle3 and MTP only, whose K/V is compacted after
acceptance. Replacing all of that from outside without a run could serve wrong text. Trees run on d2sd's own runtime.

`contract.py` lists what is used of TensorRT-LLM and where it was read, `probe.py` compares the installed version with
it, `register.py` decides and logs, `drafters.py`, `worker.py` and `chain.py` do the work.
"""
