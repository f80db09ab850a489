"""Reduce the published schemas of TrainJob, TrainingRuntime and JobSet to what the tests need: kubernetes_schemas.json.

    python -m tests.contrib.kubernetes_schemas CLONE_OF_KUBEFLOW_TRAINER CLONE_OF_JOBSET

Descriptions go, and so do fields that no job of ours has (`_LEFT_OUT`); a job that has one of them is refused.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

FILE = Path(__file__).with_name("kubernetes_schemas.json")
_NOTICE = (
    "Made by tests/contrib/kubernetes_schemas.py of the files named in `sources`, which are licensed under the Apache "
    "License, Version 2.0 (http://www.apache.org/licenses/LICENSE-2.0): Copyright The Kubeflow Authors and The "
    "Kubernetes Authors. Changed: descriptions and parts were left out, and unknown fields are refused."
)
_CRDS = {
    "TrainJob": ("kubeflow/trainer", "manifests/base/crds/trainer.kubeflow.org_trainjobs.yaml"),
    "TrainingRuntime": ("kubeflow/trainer", "manifests/base/crds/trainer.kubeflow.org_trainingruntimes.yaml"),
    "JobSet": ("kubernetes-sigs/jobset", "config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml"),
}
_LEFT_OUT = (
    "affinity", "dnsConfig", "ephemeralContainers", "hostAliases", "initContainers", "initializer", "lifecycle",
    "livenessProbe", "podGroupPolicy", "readinessProbe", "runtimePatches", "securityContext", "startupProbe",
    "topologySpreadConstraints", "volumeClaimPolicies",
)  # fmt: skip
_KEPT_VOLUMES = ("name", "emptyDir", "persistentVolumeClaim", "secret", "configMap")


def _reduce(schema: Any, name: str = "") -> Any:
    """Return a schema of a CRD as one of JSON Schema, without texts, in which no unknown field is allowed."""
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"], **({"pattern": schema["pattern"]} if "pattern" in schema else {})}
    reduced = {
        key: value
        for key, value in schema.items()
        if not key.startswith("x-") and key not in ("description", "default", "properties", "items", "format")
    }
    if "properties" in schema:
        kept = {key: value for key, value in schema["properties"].items() if key not in _LEFT_OUT}
        if name == "volumes":
            kept = {key: value for key, value in kept.items() if key in _KEPT_VOLUMES}
        reduced["properties"] = {key: _reduce(value, key) for key, value in kept.items()}
        reduced["additionalProperties"] = False
    if isinstance(schema.get("additionalProperties"), dict):
        reduced["additionalProperties"] = _reduce(schema["additionalProperties"])
    if "items" in schema:
        reduced["items"] = _reduce(schema["items"], name)
    return reduced


def _read(clone: str, path: str) -> tuple[str, Any]:
    """Return the commit of a clone, and the schema of the objects of a CRD there."""

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", clone, *words], check=True, capture_output=True, text=True).stdout

    [version] = yaml.safe_load(git("show", f"HEAD:{path}"))["spec"]["versions"]
    schema = version["schema"]["openAPIV3Schema"]
    schema["properties"].pop("status", None)
    # Of every object, and in no CRD.
    schema["properties"]["metadata"] = {
        "properties": {"name": {"type": "string"}, "labels": {"additionalProperties": {"type": "string"}}}
    }
    return git("rev-parse", "HEAD").strip(), _reduce(schema)


def main(kubeflow: str, jobset: str) -> None:
    clones = {"kubeflow/trainer": kubeflow, "kubernetes-sigs/jobset": jobset}
    found = {kind: _read(clones[repository], path) for kind, (repository, path) in _CRDS.items()}
    sources = [f"https://github.com/{where}/blob/{found[kind][0]}/{path}" for kind, (where, path) in _CRDS.items()]
    content = {"notice": _NOTICE, "sources": sources, **{kind: schema for kind, (_, schema) in found.items()}}
    FILE.write_text(json.dumps(content, separators=(",", ":"), sort_keys=True) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
