"""Numbers below 0 in place of a token that the target could not choose: an op writes them, the host reads them."""

from __future__ import annotations

#: The target's logits have no largest finite number (one is NaN or +inf, or all are -inf).
NOT_FINITE = -1
#: The request's parameters and grammar leave no token with a finite score.
NONE_LEFT = -2
