from d2sd.plugins.cascade_attention.op import cascade_attention

__all__ = ["cascade_attention"]
