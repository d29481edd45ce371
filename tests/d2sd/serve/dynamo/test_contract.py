"""The installed Dynamo keeps what the adapter assumes of it: run on 1.4.2 and on 1.6.1."""

from __future__ import annotations

import asyncio
import inspect
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

pytest.importorskip("dynamo.common.backend", reason="needs ai-dynamo: make dynamo-test")

from d2sd.bundle.options import EngineOptions
from d2sd.serve.dynamo.engine import DynamoEngine, WorkerSettings
from d2sd.serve.dynamo.run import load_sdk, run_worker
from tests.d2sd.serve.dynamo import fakes


@pytest.fixture(scope="module")
def sdk() -> Any:
    return load_sdk()


def names(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_the_methods_are_those_of_dynamos_base_class(sdk: Any) -> None:
    own = {name for name, value in vars(DynamoEngine).items() if callable(value) and not name.startswith("_")}
    for name in own:
        base, made = getattr(sdk.LLMEngine, name), getattr(DynamoEngine, name)
        assert inspect.iscoroutinefunction(made) == inspect.iscoroutinefunction(base), name
        assert inspect.isasyncgenfunction(made) == inspect.isasyncgenfunction(base), name
        assert len(names(made)) == len(names(base)), name
    assert sdk.LLMEngine.__abstractmethods__ <= {*own, "from_args"}


def test_the_records_have_the_fields_that_are_set(sdk: Any) -> None:
    needed = {
        "LlmRegistration": "context_length kv_cache_block_size total_kv_blocks max_num_seqs max_num_batched_tokens",
        "EngineConfig": "model served_model_name llm",
        "WorkerConfig": "namespace component endpoint model_name served_model_name endpoint_types discovery_backend",
    }
    exact = {
        "ComponentSnapshot": "kv_used_blocks kv_total_blocks gpu_cache_usage dp_rank kv_cache_hit_rate",
        "PushSource": "on_ready dp_rank",
    }
    found = {name: [field.name for field in fields(getattr(sdk, name))] for name in (*needed, *exact)}
    for name, names in needed.items():
        assert set(names.split()) <= set(found[name])
    for name, names in exact.items():
        assert names.split() == found[name]


def test_the_errors_are_there_and_the_fakes_too(sdk: Any) -> None:
    for name in vars(fakes.sdk().exceptions):
        raised = getattr(sdk.exceptions, name)
        assert issubclass(raised, Exception)
    assert sdk.exceptions.HttpError(429, "full").code == 429
    assert set(vars(fakes.sdk())) <= set(vars(sdk))
    payload = sdk.build_health_check_payload(5)
    assert (payload["token_ids"], payload["stop_conditions"]["max_tokens"]) == ([5], 1)


def test_the_publisher_takes_what_is_published() -> None:
    from dynamo.llm import KvEventPublisher

    stored = KvEventPublisher.publish_stored.__text_signature__
    for name in ("token_ids", "num_block_tokens", "block_hashes", "parent_hash", "cache_salt"):
        assert name in stored
    assert "block_hashes" in KvEventPublisher.publish_removed.__text_signature__


def test_workers_of_a_rollout_have_a_namespace_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_NAMESPACE_WORKER_SUFFIX", "1a2b")
    for limit in ("DYN_ENGINE_REQUEST_LIMIT", "DYN_DYNAMO_REQUEST_QUEUE_LIMIT"):
        monkeypatch.setenv(limit, "1")  # run_worker sets them; undone after the test
    made: list[Any] = []
    monkeypatch.setattr("dynamo.common.backend.run.run", lambda kind, engine_factory: made.append(engine_factory))
    monkeypatch.setattr(EngineOptions, "load", MagicMock())
    run_worker(Path("/bundle"), WorkerSettings(model="m", namespace="fleet"), EngineOptions())
    _, config = asyncio.run(made[0](None))
    assert config.namespace == "fleet-1a2b"
