"""Recipe -> bundle: `build` runs the stages of pipeline.py, which validate what they built."""

from d2sd.convert.build.pipeline import build

__all__ = ["build"]
