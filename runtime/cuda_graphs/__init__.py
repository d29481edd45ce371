"""The whole step as one CUDA graph for each kind and size: static memory, capture, replay and hand-over."""
