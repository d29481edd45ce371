"""Manifests against the schemas of Kubernetes, KEDA and the Prometheus operator; unknown fields are errors."""

from __future__ import annotations

from importlib import import_module

import pytest

from tests.deploy.files import MANIFESTS, documents

pytestmark = pytest.mark.slow  # imports the models of three APIs: five seconds

#: Where cloudcoil has the models of an API version; DynamoGraphDeployment: test_dynamo.py.
MODELS = {
    "v1": "kubernetes.core.v1",
    "apps/v1": "kubernetes.apps.v1",
    "policy/v1": "kubernetes.policy.v1",
    "keda.sh/v1alpha1": "keda.v1alpha1",
    "monitoring.coreos.com/v1": "prometheus_operator.v1",
}


@pytest.mark.parametrize("version", MODELS)
def test_manifests_are_valid_and_unknown_fields_are_errors(version: str) -> None:
    found = [document for path in MANIFESTS for document in documents(path) if document["apiVersion"] == version]
    assert found
    models = import_module(f"cloudcoil.models.{MODELS[version]}")
    for document in found:
        model = getattr(models, document["kind"])
        model.model_validate(document, extra="forbid")
        with pytest.raises(ValueError, match=r"spec\.replica\n"):
            model.model_validate(document | {"spec": document["spec"] | {"replica": 3}}, extra="forbid")


def test_every_manifest_has_a_schema() -> None:
    versions = {document["apiVersion"] for path in MANIFESTS for document in documents(path)}
    assert versions == {*MODELS, "nvidia.com/v1beta1"}
