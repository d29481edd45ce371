"""The ops that gated attention and gated delta nets have besides those of `layer_ops`, a kernel each, on CUDA.

    delta_heads.py   parameters of what comes in front of the delta rule
    reference.py     the specification in plain PyTorch, in the order of rounding of `modeling/`
    triton/          the kernels and their launchers

    op               takes the place of                                         products and ops around it
    gate_heads       heads times sigmoid(gate), quantisation                    attention  ->  o
    delta_inputs     convolution and silu, log gates, sigmoid(b)                joint      ->  the delta rule
    gated_norm       RMSNorm of heads times silu(z), quantisation               the delta rule  ->  out

Each op picks its implementation as those of `layer_ops` do.
"""

from __future__ import annotations

from d2sd.plugins.gated_layers.delta_heads import DeltaHeads
from d2sd.plugins.gated_layers.reference import delta_inputs, gate_heads, gated_norm

__all__ = ["DeltaHeads", "delta_inputs", "gate_heads", "gated_norm"]

# Shape letters: R rows, B requests, T rows of each, N rows of chunks, Hq query heads, D head size; of gated delta nets
# Hk/Hv heads of keys and of values, Dk/Dv their sizes, C channels and W taps of the convolution, P slots of states.
