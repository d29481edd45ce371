"""Runs a bundle as a worker of NVIDIA Dynamo."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from d2sd.bundle.serving import make_engine, offer_choices
from d2sd.extras import require
from d2sd.progress import bar
from d2sd.serve.dynamo.engine import DynamoEngine

if TYPE_CHECKING:
    from d2sd.bundle.load import Bundle
    from d2sd.bundle.options import EngineOptions
    from d2sd.runtime.engine import Engine
    from d2sd.serve.dynamo.engine import WorkerSettings


def load_sdk() -> Any:
    """The names of Dynamo that the adapter uses. Raises D2SDError if Dynamo is not installed."""
    require("dynamo", ("dynamo",), "d2sd worker --dynamo")
    from dynamo.common.backend import EngineConfig, LLMEngine, LlmRegistration, WorkerConfig
    from dynamo.common.backend.health_check import build_health_check_payload
    from dynamo.common.backend.publisher import ComponentSnapshot, PushSource
    from dynamo.common.utils.prometheus import gather_with_labels
    from dynamo.llm import exceptions

    return SimpleNamespace(
        EngineConfig=EngineConfig,
        LLMEngine=LLMEngine,
        LlmRegistration=LlmRegistration,
        WorkerConfig=WorkerConfig,
        build_health_check_payload=build_health_check_payload,
        ComponentSnapshot=ComponentSnapshot,
        PushSource=PushSource,
        gather_with_labels=gather_with_labels,
        exceptions=exceptions,
    )


def run_worker(path: Path, settings: WorkerSettings, options: EngineOptions) -> None:
    """Serve a bundle until SIGTERM. An empty model name takes the bundle's."""
    sdk = load_sdk()
    from dynamo.common.backend.run import run
    from dynamo.common.utils.namespace import get_worker_namespace

    bundle = options.load(path, progress=bar)
    settings = settings.model_copy(update={"model": settings.model or bundle.recipe.name})
    # More requests than this get 529 from the frontend, unless another worker has room.
    os.environ.setdefault("DYN_ENGINE_REQUEST_LIMIT", str(options.max_batch or bundle.recipe.limits.max_batch))
    os.environ.setdefault("DYN_DYNAMO_REQUEST_QUEUE_LIMIT", str(settings.max_waiting))

    def load() -> tuple[Bundle, Engine]:
        engine = make_engine(bundle, options)
        offer_choices(bundle, engine)
        return bundle, engine

    async def factory(argv: list[str] | None) -> tuple[Any, Any]:
        # Its own methods first; what they leave out is the default of Dynamo's base class.
        kind = type("D2SDEngine", (DynamoEngine, sdk.LLMEngine), {"from_args": None})
        return kind(settings, load, sdk), sdk.WorkerConfig(
            # With the suffix that the operator gives each rollout: a stream does not move to workers of another bundle.
            namespace=get_worker_namespace(settings.namespace),
            component="d2sd",
            endpoint="generate",
            model_name=str(path / "target"),
            served_model_name=settings.model,
            endpoint_types="chat,completions" if bundle.tokenizer.chat_template else "completions",
            discovery_backend=settings.discovery,
        )

    run(sdk.LLMEngine, engine_factory=factory)
