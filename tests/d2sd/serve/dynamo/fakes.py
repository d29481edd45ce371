"""Fakes stand in for what the adapter uses of Dynamo: `test_contract.py` compares them with the real one."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


class InvalidArgument(Exception):
    pass


class EngineShutdown(Exception):
    pass


class Unknown(Exception):
    pass


class HttpError(Exception):
    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def sdk() -> Any:
    """The names that `run.load_sdk` collects."""
    errors = SimpleNamespace(
        InvalidArgument=InvalidArgument, EngineShutdown=EngineShutdown, Unknown=Unknown, HttpError=HttpError
    )
    return SimpleNamespace(
        EngineConfig=SimpleNamespace,
        LlmRegistration=SimpleNamespace,
        PushSource=SimpleNamespace,
        ComponentSnapshot=SimpleNamespace,
        exceptions=errors,
        build_health_check_payload=lambda token: {"token_ids": [token], "stop_conditions": {"max_tokens": 1}},
        gather_with_labels=lambda registry, labels, prefix_filters: (registry, labels, prefix_filters),
    )


@dataclass
class Context:
    """The context of one request."""

    name: str = "one"

    def id(self) -> str:
        return self.name


@dataclass
class Publisher:
    """Dynamo's KvEventPublisher and SnapshotPublisher: keeps the blocks that the router would know."""

    blocks: dict[int, tuple[int | None, tuple[int, ...], str | None]] = field(default_factory=dict)
    removed: list[int] = field(default_factory=list)
    snapshots: list[Any] = field(default_factory=list)

    def publish_stored(
        self,
        token_ids: list[int],
        num_block_tokens: list[int],
        block_hashes: list[int],
        parent_hash: int | None = None,
        cache_salt: str | None = None,
    ) -> None:
        assert num_block_tokens == [len(token_ids)]
        (block,) = block_hashes
        assert block not in self.blocks
        self.blocks[block] = parent_hash, tuple(token_ids), cache_salt

    def publish_removed(self, block_hashes: list[int]) -> None:
        for block in block_hashes:
            del self.blocks[block]
            self.removed.append(block)

    def publish(self, rank: int, snapshot: Any) -> None:
        assert rank == 0
        self.snapshots.append(snapshot)
