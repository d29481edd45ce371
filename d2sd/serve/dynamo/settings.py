"""Settings of a Dynamo worker."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Names and limits of one worker; times are in seconds."""

    model: str  # the name in /v1/models
    namespace: str = "dynamo"
    discovery: str = "etcd"  # Dynamo's discovery backend: kubernetes, etcd or file
    max_waiting: int = 256  # requests that wait in addition to those that run
    drain_timeout: float = 30.0  # wait for running requests at shutdown, after Dynamo's grace period
    kv_events: bool = True  # tell the router what is in the prefix cache
