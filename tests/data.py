"""The folder of the public prompt sets: `data/` of the checkout, or D2SD_DATA. `make data` fills it."""

from __future__ import annotations

import os
from pathlib import Path

DATA = Path(os.environ.get("D2SD_DATA") or Path(__file__).parents[1] / "data")
