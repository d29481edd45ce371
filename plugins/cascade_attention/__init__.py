from d2sd.plugins.cascade_attention.reference import cascade_attention

__all__ = ["cascade_attention"]
