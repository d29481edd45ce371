"""The serving benchmark: figures from known arrivals, and a whole run against a server of a tiny bundle."""

from __future__ import annotations
