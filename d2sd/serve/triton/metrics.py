"""The metrics of a model instance on Triton's own endpoint, under the names that `d2sd serve` gives them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from d2sd.serve.openai.metrics import Metrics

if TYPE_CHECKING:
    from prometheus_client import Histogram

    from d2sd.runtime.engine import Engine

#: Attributes of Metrics that are histograms; Triton's have the same `observe`.
_HISTOGRAMS = ("first_token", "inter_token", "latency", "accepted_length")


class TritonMetrics(Metrics):
    """Gauges and counters are copied to Triton by `publish`; histograms observe in Triton directly."""

    def __init__(self, engine: Engine, model: str, instance: str, pb_utils: Any) -> None:
        """`instance` labels every metric. `pb_utils` is the module triton_python_backend_utils."""
        super().__init__(engine, model)
        self._pb_utils, self._instance = pb_utils, instance
        self._families: dict[str, Any] = {}  # kept: Triton deletes the metrics of a family that Python frees
        self._published: dict[tuple[str, ...], tuple[Any, float]] = {}  # metric and its value
        for name in _HISTOGRAMS:
            setattr(self, name, self._histogram_in_triton(getattr(self, name)))

    def publish(self) -> None:
        """Copy the current values."""
        self.refresh()
        absent = set(self._published)
        for family in self.registry.collect():
            if family.type == "histogram":
                continue
            for sample in family.samples:
                if not sample.name.endswith("_created"):
                    key = (sample.name, *sample.labels.values())
                    absent.discard(key)
                    self._set(key, family, sample)
        for key in absent:  # a policy that is not in force any more
            metric, _ = self._published[key]
            metric.set(0)

    def _set(self, key: tuple[str, ...], family: Any, sample: Any) -> None:
        gauge = family.type == "gauge"
        if key not in self._published:
            kinds = self._pb_utils.MetricFamily
            made = self._family(sample.name, family.documentation, kinds.GAUGE if gauge else kinds.COUNTER)
            self._published[key] = made.Metric(labels=sample.labels | {"instance": self._instance}), 0.0
        metric, before = self._published[key]
        if gauge:
            metric.set(sample.value)
        else:
            metric.increment(sample.value - before)
        self._published[key] = metric, sample.value

    def _family(self, name: str, text: str, kind: Any) -> Any:
        if name not in self._families:
            self._families[name] = self._pb_utils.MetricFamily(name=name, description=text, kind=kind)
        return self._families[name]

    def _histogram_in_triton(self, histogram: Histogram) -> Any:
        (described,) = histogram.describe()
        family = self._family(described.name, described.documentation, self._pb_utils.MetricFamily.HISTOGRAM)
        labels = {"model_name": self._model, "instance": self._instance}
        return family.Metric(labels=labels, buckets=list(histogram._upper_bounds[:-1]))  # the last one is infinite
