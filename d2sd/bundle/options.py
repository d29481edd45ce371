"""The options of an engine, for every face that serves a bundle: names, bounds, neutral values and what each does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import Field, ValidationError
from typing_extensions import Self, TypedDict

from d2sd.bundle.devices import BackendName
from d2sd.errors import D2SDError
from d2sd.progress import Progress, silent
from d2sd.recipe import Method
from d2sd.schema import Closed
from d2sd.typed import named, plain

if TYPE_CHECKING:
    from d2sd.bundle.load import Bundle


Function = TypeVar("Function", bound=Callable[..., Any])


class EngineOptions(Closed):
    """How a bundle is served; None takes the recipe's value. Descriptions are the help of the commands' options.

    Raises `D2SDError` naming a wrong one where `of` makes it.
    """

    max_batch: Annotated[int | None, Field(ge=1, le=4096, description="Requests that decode together.")] = None
    prefix_cache: Annotated[bool | None, Field(description="Reuse K/V of shared prefixes.")] = None
    policy: Annotated[Method | None, Field(description="Tree policy; +lookup: with copies.")] = None
    device: Annotated[str, Field(description="PyTorch device: cpu, cuda or cuda:N.")] = "cpu"
    tensor_parallel: Annotated[
        int, Field(ge=1, le=64, description="Processes that share the target, on CUDA a GPU each.")
    ] = 1
    backend: Annotated[
        BackendName, Field(description="PyTorch, or the bundle's graphs in ONNX Runtime or as TensorRT engines.")
    ] = "torch"

    @classmethod
    def of(cls, values: Mapping[str, Any], what: str, *, strict: bool = False) -> Self:
        """Check the values. Raises `D2SDError`, whose first sentence is `what`, for the first that is wrong.

        With `strict` no text is read as a number or a switch; numbers may be numpy's.
        """
        try:
            return cls.model_validate({name: plain(value) for name, value in values.items()}, strict=strict)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = str(first["loc"][0])
            found = named(values.get(where)) if strict else first["input"]
            raise D2SDError(what, where=where, found=found, expected=first["msg"]) from None

    def load(self, path: Path, *, verify: bool = True, progress: Progress = silent) -> Bundle:
        """Open a bundle that is to serve alone with these options; `make_engine` then makes the engine."""
        from d2sd.bundle.load import load_bundle  # here, so that a command's help needs no torch

        ranks, device = self.tensor_parallel, self.device
        bundle = load_bundle(path, verify=verify, progress=progress, tensor_parallel=ranks, device=device)
        return replace(bundle, keep=False)


class EngineKeywords(TypedDict, total=False):
    """The same options as keyword arguments, for type checkers."""

    max_batch: int | None
    prefix_cache: bool | None
    policy: Method | None
    device: str
    tensor_parallel: int
    backend: BackendName


class ServiceOptions(Closed):
    """How requests wait for an engine that several clients share."""

    # in addition to those that run
    max_waiting: Annotated[int, Field(ge=0, le=10**6, description="Requests that may wait.")] = 256
    drain_timeout: Annotated[float, Field(ge=0, le=366 * 86400, description="Seconds at shutdown.")] = 30


def naming_options(function: Function) -> Function:
    """Let `help` and editors show the options of an engine where a function takes them as `**options`."""
    shown, fields = signature(function), EngineOptions.model_fields
    options = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=field.default, annotation=field.annotation)
        for name, field in fields.items()
    ]
    function.__signature__ = shown.replace(parameters=[*shown.parameters.values()][:-1] + options)  # type: ignore[attr-defined]
    return function
