"""Two drafters inside TensorRT-LLM's PyTorch flow. NOT YET RUN with an installed TensorRT-LLM or on a GPU.

Registered: DFlash mode with both drafters, verified as one chain by TensorRT-LLM's own acceptance. At the likeliest
rejection boundary of the first draft, the second drafter drafts again after the kept prefix. TensorRT-LLM commits the
target's tokens only, whatever is drafted, and this package does not change the target's K/V.

Not registered: D²SD's tree. In TensorRT-LLM a DFlash step is a chain of max_draft_len + 1 tokens, for its argument
class, its sampler and its K/V rewind alike; trees exist for Eagle3 and MTP only, whose K/V is compacted after
acceptance. Replacing all of that from outside without a run could serve wrong text. Trees run on d2sd's own runtime.

`probe.py` lists the parts of TensorRT-LLM that are used and the sources that were read, and compares the installed
version with them, `register.py` patches or logs why not, `drafters.py` and `worker.py` draft.
"""
