"""OpenTelemetry spans, one for each request, where opentelemetry is installed and an endpoint is configured."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

#: Facts of the log line that a span reports, and its attribute.
_ATTRIBUTES = {
    "status": "http.response.status_code",
    "model": "gen_ai.request.model",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
    "accepted_tokens": "d2sd.usage.accepted_tokens",
}


class Spans:
    """Makes spans, or does nothing if OTEL_EXPORTER_OTLP_ENDPOINT is unset or opentelemetry is not installed."""

    def __init__(self) -> None:
        self._tracer: Any = None
        if os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") and find_spec("opentelemetry"):
            from opentelemetry import trace

            if find_spec("opentelemetry.sdk") and find_spec("opentelemetry.exporter"):
                from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
                from opentelemetry.sdk.trace import TracerProvider
                from opentelemetry.sdk.trace.export import BatchSpanProcessor

                provider = TracerProvider()
                provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
                trace.set_tracer_provider(provider)
            self._tracer = trace.get_tracer("d2sd")

    @contextmanager
    def request(self, headers: Mapping[bytes, bytes], facts: Mapping[str, Any]) -> Iterator[None]:
        """A server span, child of the caller's where the headers name one; `facts` become attributes at its end."""
        if self._tracer is None:
            yield
            return
        from opentelemetry import propagate, trace

        carrier = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers.items()}
        name = f"{facts['method']} {facts['path']}"
        with self._tracer.start_as_current_span(name, propagate.extract(carrier), trace.SpanKind.SERVER) as span:
            try:
                yield
            finally:
                for fact, attribute in _ATTRIBUTES.items():
                    if fact in facts:
                        span.set_attribute(attribute, facts[fact])
