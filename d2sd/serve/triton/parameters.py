"""The parameters of the model in config.pbtxt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from d2sd.bundle.backends import BackendName
from d2sd.errors import D2SDError
from d2sd.policies import current_name
from d2sd.recipe import Method


class Parameters(BaseModel):
    """Parameters that `d2sd triton` writes and the model reads; Triton carries all values as strings.

    Raises D2SDError that names the parameter.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")  # Triton has parameters of its own

    bundle: str  # absolute path, as the server sees it
    policy: Annotated[Method, BeforeValidator(current_name)] | None = None
    backend: BackendName = "torch"
    max_batch: Annotated[int, Field(ge=1, le=4096)] | None = None
    prefix_cache: bool | None = None
    tensor_parallel: Annotated[int, Field(ge=1, le=64)] = 1  # GPUs from that of the instance on
    max_waiting: Annotated[int, Field(ge=0, le=10**6)] = 256  # in addition to max_batch; more get UNAVAILABLE
    stream_interval: Annotated[int, Field(ge=1, le=2**20)] = 4  # least tokens of a stream's responses after its first
    drain_timeout: Annotated[float, Field(ge=0, le=366 * 86400)] = 30  # seconds

    @classmethod
    def parse(cls, values: Sequence[str]) -> Parameters:
        """Read `key=value` strings; unknown keys are errors."""
        parameters = dict(value.partition("=")[::2] for value in values)
        if unknown := parameters.keys() - cls.model_fields.keys():
            raise D2SDError(
                "There is no such parameter.", found=", ".join(sorted(unknown)), expected=", ".join(cls.model_fields)
            )
        return cls._checked(parameters)

    @classmethod
    def of(cls, parameters: Mapping[str, Mapping[str, Any]]) -> Parameters:
        """Read the parameters of a model's configuration."""
        return cls._checked({name: value["string_value"] for name, value in parameters.items()})

    @classmethod
    def _checked(cls, values: Mapping[str, Any]) -> Parameters:
        try:
            return cls(**values)
        except ValidationError as error:
            first = error.errors()[0]
            raise D2SDError(
                "A parameter is invalid.", where=str(first["loc"][0]), found=first["input"], expected=first["msg"]
            ) from None

    def strings(self) -> dict[str, str]:
        """The values that are set, as config.pbtxt holds them."""
        return {
            name: f"{value:g}" if isinstance(value, float) else str(value)
            for name, value in self.model_dump(exclude_none=True).items()
        }
