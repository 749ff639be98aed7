"""The manifests of docs/recipes/kubernetes.md: their schemas, and their commands as they stand."""

from __future__ import annotations

import importlib
import re
import signal
from contextlib import ExitStack

import pytest
import yaml

from .._ports import free_port
from .._snippets import ROOT, blocks
from .schemas import faults, lost
from .started import Started, environment, write_script

MANIFESTS = {
    manifest["kind"]: manifest
    for manifest in map(yaml.safe_load, blocks(ROOT / "docs" / "recipes" / "kubernetes.md", "yaml"))
}


def replicas(manifest):
    return manifest["spec"]["pytorchReplicaSpecs"]


@pytest.fixture(scope="module")
def models():
    """The models of Kubeflow Trainer's API, and those of Kubernetes itself."""
    return importlib.import_module("kubeflow_trainer_api.models")  # 0.6 s


def test_the_trainjob_is_what_its_models_know(models):
    """No field is unknown, misplaced, or of another type."""
    manifest = MANIFESTS["TrainJob"]
    kept = models.TrainerV1alpha1TrainJob.from_dict(manifest)

    assert list(lost(manifest, kept.to_dict())) == []


def test_the_pytorchjob_is_what_its_schema_knows():
    """The operator's own fields; the names that the operator looks for."""
    manifest = MANIFESTS["PyTorchJob"]
    schema = yaml.safe_load((ROOT / "tests" / "recipes" / "pytorchjob.yaml").read_text("utf-8"))

    assert list(faults(schema, manifest)) == []
    for replica in replicas(manifest).values():
        assert [each["name"] for each in replica["template"]["spec"]["containers"]] == ["pytorch"]


@pytest.mark.parametrize("kind", ["Master", "Worker"])
def test_pods_of_the_pytorchjob_are_what_kubernetes_knows(models, kind):
    """The operator passes the template on as it is."""
    template = replicas(MANIFESTS["PyTorchJob"])[kind]["template"]
    kept = models.IoK8sApiCoreV1PodTemplateSpec.from_dict(template)

    assert list(lost(template, kept.to_dict())) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"spec": {"pytorchReplicaSpecs": {}, "nprocPerNode": 1}}, "nprocPerNode: 1 is no string"),
        ({"kind": "PytorchJob"}, "kind: 'PytorchJob' is none of"),
        ({"spec": {}}, "spec.pytorchReplicaSpecs: missing"),
        ({"specs": {}}, "specs: unknown"),
    ],
)
def test_a_wrong_manifest_is_told(change, said):
    """The check by the schema sees wrong types, values and names."""
    schema = yaml.safe_load((ROOT / "tests" / "recipes" / "pytorchjob.yaml").read_text("utf-8"))

    assert said in "\n".join(faults(schema, MANIFESTS["PyTorchJob"] | change))


def grace(manifest):
    """What SIGTERM is followed by, in seconds: torchrun's patience, and the pod's."""
    text = yaml.dump(manifest)
    patience = re.findall(r"TORCH_ELASTIC_SHUTDOWN_TIMEOUT\n +value: '(\d+)'", text)
    pods = re.findall(r"terminationGracePeriodSeconds: (\d+)", text)
    return max(map(int, patience)), min(map(int, pods))


@pytest.mark.parametrize("kind", MANIFESTS)
def test_torchrun_is_less_patient_than_the_pod(kind):
    """Else Kubernetes kills it while its workers save."""
    torchruns, pods = grace(MANIFESTS[kind])

    assert 30 < torchruns < pods


def pods_of(kind, port):
    """The command of each pod, and the variables that its operator adds.

    As `pkg/runtime/framework/plugins/torch` of Kubeflow Trainer 2.3.0 and
    `pkg/controller.v1/pytorch` of training-operator 1.9.0 set them.
    """
    manifest = MANIFESTS[kind]
    if kind == "TrainJob":
        trainer = manifest["spec"]["trainer"]
        containers = [trainer] * trainer["numNodes"]
        processes = trainer["numProcPerNode"]
    else:
        processes = manifest["spec"]["nprocPerNode"]
        containers = [
            replica["template"]["spec"]["containers"][0]
            for replica in replicas(manifest).values()
            for _ in range(replica["replicas"])
        ]
    for number, container in enumerate(containers):
        names = {
            "PET_NNODES": len(containers),
            "PET_NPROC_PER_NODE": processes,
            "PET_NODE_RANK": number,
            "PET_MASTER_ADDR": "127.0.0.1",
            "PET_MASTER_PORT": port,
        }
        if kind == "PyTorchJob":
            names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            names |= {"RANK": number, "WORLD_SIZE": len(containers) * int(processes)}
        own = {each["name"]: each["value"] for each in container["env"]}
        yield container["command"], environment(**names, **own)


def start(kind, folder, stack):
    """Start what the containers of all pods run, with a folder for the volume."""
    for command, names in pods_of(kind, free_port()):
        words = [word.replace("/checkpoints", str(folder / "volume")) for word in command]
        yield stack.enter_context(Started(words, folder, names))


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", MANIFESTS)
def test_a_pod_is_deleted_and_comes_back(kind, tmp_path):
    """SIGTERM to the first process of one: all save, fail, so that they are started, and go on."""
    write_script(tmp_path, steps=100_000)
    with ExitStack() as stack:
        leader, other = start(kind, tmp_path, stack)
        leader.wait_for("saved step 20\n")
        other.process.send_signal(signal.SIGTERM)
        codes = [leader.wait(), other.wait()]
    saved = int(re.findall(r"saved step (\d+)\n", leader.text)[-1])
    assert 0 not in codes, leader.text + other.text

    write_script(tmp_path, steps=saved + 7)
    with ExitStack() as stack:
        again = list(start(kind, tmp_path, stack))
        codes = [pod.wait() for pod in again]

    assert codes == [0, 0], "\n".join(pod.text for pod in again)
    assert f"begins at step {saved}\n" in again[0].text
    assert f"saved step {saved + 7}\n" in again[0].text
