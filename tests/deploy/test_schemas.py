"""Manifests against the schemas of Kubernetes, KEDA and the Prometheus operator; unknown fields are errors."""

from __future__ import annotations

from importlib import import_module
from typing import Any

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
DOCUMENTS = {
    f"{path}:{document['kind']} {document['metadata']['name']}": document
    for path in MANIFESTS
    for document in documents(path)
    if document["kind"] != "DynamoGraphDeployment"
}


def check(document: dict[str, Any]) -> None:
    """Raise ValidationError, a ValueError, with the path of what is wrong."""
    module = import_module(f"cloudcoil.models.{MODELS[document['apiVersion']]}")
    getattr(module, document["kind"]).model_validate(document, extra="forbid")


@pytest.mark.parametrize("document", DOCUMENTS.values(), ids=DOCUMENTS)
def test_manifests_are_valid(document: dict[str, Any]) -> None:
    check(document)


@pytest.mark.parametrize("document", DOCUMENTS.values(), ids=DOCUMENTS)
def test_unknown_fields_are_errors(document: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="replica"):
        check(document | {"spec": document["spec"] | {"replica": 3}})
