"""The metrics of a model instance on Triton's own endpoint, under the names that `d2sd serve` gives them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from d2sd.serve.openai.metrics import Metrics

if TYPE_CHECKING:
    from d2sd.runtime.engine import Engine


class TritonMetrics(Metrics):
    """Copies to Triton, by `publish`, what has changed: every value set there is a message to the server and an answer.

    A histogram's samples, `_bucket`, `_sum` and `_count`, are counters in Triton, because a message for each
    observation would cost more than to generate the token. Their names and labels are those of a histogram.
    """

    def __init__(self, engine: Engine, model: str, instance: str, pb_utils: Any) -> None:
        """`instance` labels every metric. `pb_utils` is the module triton_python_backend_utils."""
        super().__init__(engine, model)
        self._pb_utils, self._instance = pb_utils, instance
        self._families: dict[str, Any] = {}  # kept: Triton deletes the metrics of a family that Python frees
        self._published: dict[tuple[str, ...], tuple[Any, float]] = {}  # metric and its value

    def publish(self) -> None:
        """Copy the current values."""
        self.refresh()
        absent = set(self._published)
        for family in self.registry.collect():
            for sample in family.samples:
                if not sample.name.endswith("_created"):
                    key = (sample.name, *sample.labels.values())
                    absent.discard(key)
                    self._set(key, family, sample)
        for key in absent:  # a policy that is not in force any more
            metric, before = self._published[key]
            if before:
                metric.set(0)
                self._published[key] = metric, 0.0

    def _set(self, key: tuple[str, ...], family: Any, sample: Any) -> None:
        gauge = family.type == "gauge"
        if key not in self._published:
            triton_family = self._family(sample.name, family.documentation, gauge=gauge)
            self._published[key] = triton_family.Metric(labels=sample.labels | {"instance": self._instance}), 0.0
        metric, before = self._published[key]
        if sample.value != before:
            metric.set(sample.value) if gauge else metric.increment(sample.value - before)
            self._published[key] = metric, sample.value

    def _family(self, name: str, text: str, *, gauge: bool) -> Any:
        if name not in self._families:
            kinds = self._pb_utils.MetricFamily
            kind = kinds.GAUGE if gauge else kinds.COUNTER
            self._families[name] = kinds(name=name, description=text, kind=kind)
        return self._families[name]
