"""Builds bundles: `build` runs the stages of pipeline.py, including the checks of the built bundle."""

from d2sd.build.pipeline import build

__all__ = ["build"]
