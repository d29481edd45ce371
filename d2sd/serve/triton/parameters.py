"""The parameters of the model in config.pbtxt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field
from typing_extensions import Self

from d2sd.bundle.options import EngineOptions, ServiceOptions
from d2sd.errors import D2SDError

_WRONG = "A parameter is invalid."


class Parameters(ServiceOptions, EngineOptions):
    """Parameters that `d2sd triton` writes and the model reads; Triton carries all values as strings.

    The instance of a model has a device, so that config.pbtxt names none. Raises D2SDError that names the parameter.
    """

    bundle: str  # absolute path, as the server sees it
    device: Annotated[str, Field(exclude=True)] = "cpu"
    stream_interval: Annotated[int, Field(ge=1, le=2**20)] = 4  # least tokens of a stream's responses after its first

    @classmethod
    def parse(cls, values: Sequence[str]) -> Self:
        """Read `key=value` strings; unknown keys are errors."""
        parameters = dict(value.partition("=")[::2] for value in values)
        known = ["bundle", *SETTABLE]
        if unknown := sorted(parameters.keys() - known):
            raise D2SDError("There is no such parameter.", found=", ".join(unknown), expected=", ".join(known))
        return cls.of(parameters, _WRONG)

    @classmethod
    def read(cls, parameters: Mapping[str, Mapping[str, Any]], device: str) -> Self:
        """Read the parameters of a model's configuration, for an instance on `device`; Triton's own are in capitals."""
        values = {name: value["string_value"] for name, value in parameters.items() if not name.isupper()}
        return cls.of(values | {"device": device}, _WRONG)

    def strings(self) -> dict[str, str]:
        """The values that are set, as config.pbtxt holds them."""
        return {
            name: f"{value:g}" if isinstance(value, float) else str(value)
            for name, value in ({"bundle": self.bundle} | self.model_dump(exclude_none=True)).items()
        }


#: Those that `d2sd triton --set` takes.
SETTABLE = [name for name, field in Parameters.model_fields.items() if not field.exclude and name != "bundle"]
