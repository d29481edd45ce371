"""The TensorRT-LLM face of a bundle: LLM-API arguments, the module for two drafters, and the old checkpoint layout."""
