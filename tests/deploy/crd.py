"""Holds `deploy/k8s` against custom resource definitions that you have at hand:

    python -m tests.deploy.crd ray.io_rayclusters.yaml monitoring.coreos.com_podmonitors.yaml ...

Their owners (KubeRay: `ray-operator/config/crd/bases`, the Prometheus operator: `example/prometheus-operator-crd-full`)
put them into no package of Python's, and that of a RayCluster has nearly a megabyte: hence a program and not a test.
`docs/deploy.md` says against which versions it was last run.
"""

import copy
import sys
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from tests.deploy.test_k8s_files import KINDS, documents


def main(files: list[str]) -> int:
    """The number of documents that do not fit, or are held against nothing."""
    found = documents()
    missing = set(KINDS)
    failed = 0
    for file in files:
        crd = yaml.safe_load(Path(file).read_text())
        kind = crd["spec"]["names"]["kind"]
        document = found[kind]
        missing.discard(kind)
        schema = schema_of(crd, document["apiVersion"].partition("/")[2])
        faults = [f"{list(e.path)}: {e.message}" for e in checked(schema, document)]
        wrong = copy.deepcopy(document)
        wrong["spec"]["lables"] = {}
        if not checked(schema, wrong):
            faults.append("this definition lets anything pass")
        print(f"{kind}: {'; '.join(faults) or 'fits'}")
        failed += bool(faults)
    for kind in sorted(missing):
        print(f"{kind}: no definition given")
    return failed + len(missing)


def schema_of(crd: dict[str, Any], version: str) -> dict[str, Any]:
    """Return a resource's schema, made strict as an API server's field validation is: a field that it does not name is
    an error."""
    versions = {one["name"]: one["schema"]["openAPIV3Schema"] for one in crd["spec"]["versions"]}
    schema: dict[str, Any] = copy.deepcopy(versions[version])
    schema["properties"]["metadata"] = {}
    _make_strict(schema)
    return schema


def checked(schema: dict[str, Any], document: dict[str, Any]) -> list[jsonschema.ValidationError]:
    return list(jsonschema.Draft7Validator(schema).iter_errors(document))


def _make_strict(schema: Any) -> None:
    if isinstance(schema, list):
        for one in schema:
            _make_strict(one)
    if not isinstance(schema, dict):
        return
    if schema.get("x-kubernetes-int-or-string"):
        schema["type"] = ["integer", "string"]
    open_ended = schema.get("x-kubernetes-preserve-unknown-fields")
    if "properties" in schema and schema.get("type") == "object" and not open_ended:
        schema.setdefault("additionalProperties", False)
    for one in list(schema.values()):
        _make_strict(one)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
