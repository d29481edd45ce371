"""Builds bundles: the stages of pipeline.py, including the checks of the built bundle."""
