"""The manifest by which Kubernetes starts a job: an Indexed Job, and a Service that gives its pods names. Pure.

Each pod is a machine of the job. Pod 0 hosts the rendezvous; its name is known before it runs. A job of unisono ends as
a whole, so the pods fail together, are replaced one by one, and meet again. Start reading at `kubernetes_manifest`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unisono.launch.schedulers.request import SchedulerRequest
from unisono.launch.schedulers.yaml_text import yaml_text

__all__ = ["kubernetes_manifest", "kubernetes_objects"]

_PORT = 29500
_JOB_LABEL = "batch.kubernetes.io/job-name"
_INDEX = "batch.kubernetes.io/job-completion-index"
_NAME_KNOWN = """\
import socket, sys, time
for _ in range(600):
    try:
        sys.exit(socket.getaddrinfo(sys.argv[1], None) == [])
    except socket.gaierror:
        time.sleep(1)
sys.exit(f"{sys.argv[1]} has no address after 600 s: is its pod running?")
"""


def kubernetes_manifest(request: SchedulerRequest, *, image: str, claims: Mapping[str, str]) -> str:
    """Return the manifest as YAML, for `kubectl apply -f -`.

    Args:
        request: The job. With a range of machines, it takes the lower end: a Job has a fixed number of pods.
        image: The container image, which has unisono and the program.
        claims: Where persistent volumes are mounted, by the names of their claims.
    """
    return "---\n".join(yaml_text(each) for each in kubernetes_objects(request, image=image, claims=claims))


def kubernetes_objects(request: SchedulerRequest, *, image: str, claims: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the objects of the manifest; see `kubernetes_manifest`."""
    pods = request.min_nodes
    endpoint = f"{request.name}-0.{request.name}"
    resources: dict[str, str] = {}
    if request.cpus is not None:
        resources["cpu"] = str(request.cpus)
    if request.memory is not None:
        resources["memory"] = request.memory
    if request.gpus is not None:
        resources["nvidia.com/gpu"] = str(request.gpus)
    meeting = ["--nnodes", str(pods), "--rdzv-endpoint", f"{endpoint}:{_PORT}"] if pods > 1 else []
    launcher, flags = request.command[:2], request.command[2:]
    container: dict[str, Any] = {
        "name": "unisono",
        "image": image,
        "command": [*launcher],
        "args": [*meeting, *(word.replace("$(", "$$(") for word in flags)],  # Kubernetes would expand $(NAME)
        "volumeMounts": [
            {"name": "shm", "mountPath": "/dev/shm"},
            *({"name": f"claim-{number}", "mountPath": path} for number, path in enumerate(claims.values())),
        ],
        # The launcher does not answer: it is stopped or stuck. A hang of ranks is the launcher's to report.
        "livenessProbe": {
            "exec": {"command": [launcher[0], "ps"]},
            "initialDelaySeconds": 60,
            "periodSeconds": 60,
            "timeoutSeconds": 20,
            "failureThreshold": 5,
        },
    }
    if pods > 1:
        container["env"] = [
            {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": f"metadata.annotations['{_INDEX}']"}}}
        ]
        container["ports"] = [{"name": "rendezvous", "containerPort": _PORT}]
    if resources:
        # Equal requests and limits: ranks are as fast as the slowest, and the last to be evicted.
        container["resources"] = {"requests": resources, "limits": resources}
    if request.folder:
        container["workingDir"] = request.folder
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": request.save_s,
        "containers": [container],
        "volumes": [
            {"name": "shm", "emptyDir": {"medium": "Memory"}},  # a pod has 64 MB otherwise, too few for data workers
            *(
                {"name": f"claim-{number}", "persistentVolumeClaim": {"claimName": claim}}
                for number, claim in enumerate(claims)
            ),
        ],
    }
    if pods > 1:
        pod["subdomain"] = request.name
        # The name of pod 0 is known to DNS a moment after the pod runs, and launchers refuse unknown names.
        pod["initContainers"] = [
            {"name": "wait-for-name", "image": image, "command": ["python", "-c", _NAME_KNOWN, endpoint]}
        ]
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": request.name},
        "spec": {
            "completionMode": "Indexed",
            "completions": pods,
            "parallelism": pods,
            "backoffLimitPerIndex": request.restarts,
            "maxFailedIndexes": 0,
            "podFailurePolicy": {
                "rules": [
                    # A preempted or drained pod, and the others, which end with it, are replaced without being counted.
                    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                    {
                        "action": "Ignore",
                        "onExitCodes": {"containerName": "unisono", "operator": "In", "values": [143]},
                    },
                ]
            },
            "template": {"spec": pod},
        },
    }
    if pods == 1:
        return [job]
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": request.name},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {_JOB_LABEL: request.name},
            "ports": [{"name": "rendezvous", "port": _PORT}],
        },
    }
    return [service, job]
