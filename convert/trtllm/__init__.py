"""TensorRT-LLM's files in a bundle: LLM-API arguments, and the module for two drafters."""
