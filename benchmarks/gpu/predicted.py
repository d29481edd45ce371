"""Times of captured steps that were predicted before a GPU had run any: the page of results has them in brackets."""

from __future__ import annotations

_BATCHES = (1, 4, 8, 16, 32)
#: Milliseconds of steps with so many requests by the review's model of nodes, on an H200.
_H200 = {
    "bf16 off x{}": (4.85, 5.07, 5.45, 6.21, 7.74),
    "bf16 chain x{} 16 nodes": (6.13, 6.24, 7.04, 10.6, 19.6),
    "bf16 ddtree x{}": (6.20, 9.12, 15.9, 29.8, 58.0),
    "bf16 hybrid x{} 16 nodes": (7.21, 7.89, 10.1, 16.4, 30.7),
    "bf16 hybrid x{} 16 nodes 1 branches": (7.18, 7.35, 8.28, 12.4, 23.1),
    "bf16 hybrid x{}": (7.28, 10.7, 18.9, 35.6, 69.1),
    "mixed hybrid x{} V=32768": (6.35, 9.53, 16.9, 31.9, 62.0),
    "fp8 off x{} V=32768": (3.49, 3.70, 4.08, 4.85, 6.37),
    "fp8 chain x{} 16 nodes V=32768": (4.29, 4.40, 5.14, 7.68, 13.8),
    "fp8 hybrid x{} V=32768": (4.97, 7.38, 12.6, 23.5, 45.3),
}
#: By the name of a GPU and a case.
PREDICTED = {
    "H200": {
        f"budgets/{name.format(batch)}": value
        for name, values in _H200.items()
        for batch, value in zip(_BATCHES, values, strict=True)
    }
}
