"""Manifests for Kubernetes: a LeaderWorkerSet (leaderworkerset.x-k8s.io/v1), and a Service in front of its leaders.

One pod a node of the plan. The leader is node 0 and serves HTTP; each pod learns its place from the variables that the
LeaderWorkerSet gives it (kvlaunch/launch/cluster_env.py), so all run the same command.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvlaunch import env
from kvlaunch.errors import ConfigError
from kvlaunch.render.job import GIB, Job

Manifest = dict[str, Any]

SECRET_KEY = "secret"
"""Of the Secret's data."""
_LABELS = "leaderworkerset.sigs.k8s.io/"
_MOST_NAME = 40
"""Characters: the controller makes names of pods from it, and of a label, which has 63 at most."""
_MIB = 1 << 20
_PERIOD_S = 10
_IMAGE = "For example: --image registry.example.com/kvlaunch:1"
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesOptions:
    """What the plan does not say.

    Raises:
        ConfigError: a value that the API server would refuse.
    """

    image: str
    """Container image that has kvlaunch and the engine. Must be given: `render` refuses an empty one."""
    namespace: str | None = None
    replicas: int = 1
    """Groups: engines, each on all nodes of the plan."""
    secret: str | None = None
    """Name of the Secret that holds the run's secret; None: made from the run's name."""
    new_secret: str | None = None
    """Write this secret into the manifests; None: the user makes the Secret."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w.:/@-]*", self.image, re.ASCII):
            raise ConfigError(f"--image {self.image!r}: that is no name of an image.", hint=_IMAGE)
        for option, value, dot in (("--namespace", self.namespace, ""), ("--secret", self.secret, ".")):
            if value is not None and not re.fullmatch(rf"[a-z0-9]([a-z0-9{dot}-]{{0,61}}[a-z0-9])?", value):
                raise ConfigError(
                    f"{option} {value!r}: Kubernetes takes small letters, digits and '-', at most 63.",
                    hint=f"For example: {option} serving",
                )
        if self.replicas < 1:
            raise ConfigError(f"--replicas {self.replicas}: must be at least 1.")


def render(job: Job, options: KubernetesOptions) -> str:
    """The manifests as YAML, one document after the other.

    Raises:
        ConfigError: there is no image, or the server could not be reached as it is configured.
    """
    import yaml

    if not options.image:
        raise ConfigError(
            "render kubernetes needs --image: what the pods run.",
            hint=f"It must have kvlaunch and {job.plan.engine}. {_IMAGE}",
        )
    _check_server(job)
    documents = "---\n".join(
        yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=10_000)
        for document in manifests(job, options)
    )
    return "".join(f"# {line}\n" for line in _header(job, options)) + documents


def manifests(job: Job, options: KubernetesOptions) -> list[Manifest]:
    """Secret (where asked for), Service, LeaderWorkerSet."""
    found = [_service(job, options), _set(job, options)]
    if job.needs_secret and options.new_secret is not None:
        found.insert(0, _secret(job, options, options.new_secret))
    return found


def name_of(job: Job) -> str:
    """Name of the LeaderWorkerSet, from that of the run: a DNS label that begins with a letter."""
    cleaned = re.sub(r"[^a-z0-9]+", "-", job.plan.name.lower()).strip("-")
    named = cleaned if cleaned[:1].isalpha() else f"run-{cleaned}"
    return named[:_MOST_NAME].rstrip("-")


def secret_name(job: Job, options: KubernetesOptions) -> str:
    return options.secret or f"{name_of(job)}-secret"


def _check_server(job: Job) -> None:
    server = job.plan.server
    if server.port == 0:
        raise ConfigError(
            "server.port=0: probes and the Service need a port that is known.", hint="For example: server.port=8000"
        )
    if not job.default_host and server.host in _LOOPBACK:
        raise ConfigError(
            f"server.host={server.host}: neither probes nor the Service reach a pod's loopback.",
            hint="Leave it out: 0.0.0.0 is set here.",
        )


def _header(job: Job, options: KubernetesOptions) -> Iterator[str]:
    plan = job.plan
    yield f"{' '.join(job.summary.split())}."
    yield "Written by kvlaunch render kubernetes. The cluster needs the LeaderWorkerSet controller."
    if job.needs_secret and options.new_secret is None:
        namespace = f" --namespace {options.namespace}" if options.namespace else ""
        yield "Before it, once, make the secret that the nodes of a run share:"
        yield (
            f"  kvlaunch secret new | kubectl create secret generic {secret_name(job, options)}{namespace}"
            f" --from-file={SECRET_KEY}=/dev/stdin"
        )
    held = [plan.model.path] if plan.model.path.startswith("/") and not plan.model.make_tiny else []
    held += [job.config_dir] if job.config_dir else []
    if held:
        yield " ".join(f"The image, or a volume of yours, must hold: {', '.join(held)}".split())


def _metadata(name: str, options: KubernetesOptions, labels: dict[str, str]) -> Manifest:
    namespace = {"namespace": options.namespace} if options.namespace else {}
    return {"name": name, **namespace, "labels": labels}


def _labels(job: Job) -> dict[str, str]:
    return {"app.kubernetes.io/name": name_of(job), "app.kubernetes.io/managed-by": "kvlaunch"}


def _secret(job: Job, options: KubernetesOptions, text: str) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": _metadata(secret_name(job, options), options, _labels(job)),
        "type": "Opaque",
        "stringData": {SECRET_KEY: text},
    }


def _service(job: Job, options: KubernetesOptions) -> Manifest:
    name = name_of(job)
    return {
        "apiVersion": "v1",
        "kind": "Service",
        # The set's own name is taken: by the headless service that its controller makes.
        "metadata": _metadata(f"{name}-http", options, _labels(job)),
        "spec": {
            "selector": {f"{_LABELS}name": name, f"{_LABELS}worker-index": "0"},
            "ports": [{"name": "http", "port": job.plan.server.port, "targetPort": "http", "protocol": "TCP"}],
        },
    }


def _set(job: Job, options: KubernetesOptions) -> Manifest:
    leader = {"metadata": {"labels": _labels(job)}, "spec": _pod(job, options, leader=True)}
    worker = {"metadata": {"labels": _labels(job)}, "spec": _pod(job, options, leader=False)}
    alone = job.plan.nnodes == 1
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": _metadata(name_of(job), options, _labels(job)),
        "spec": {
            "replicas": options.replicas,
            # A leader is ready when all its workers serve with it: they must not wait for that.
            "startupPolicy": "LeaderCreated",
            "leaderWorkerTemplate": {
                "size": job.plan.nnodes,
                # What one pod loses (weights, KV cache, its place in every collective) the others cannot go on without.
                "restartPolicy": "RecreateGroupOnPodRestart",
                # A group of one is made from the worker's template, as is every leader without one of its own.
                **({"workerTemplate": leader} if alone else {"leaderTemplate": leader, "workerTemplate": worker}),
            },
        },
    }


def _pod(job: Job, options: KubernetesOptions, *, leader: bool) -> Manifest:
    return {
        "terminationGracePeriodSeconds": job.grace_s,
        # Variables of the cluster's services would reach the engine: VLLM_PORT=tcp://... from a service called vllm.
        "enableServiceLinks": False,
        "automountServiceAccountToken": False,
        "containers": [_container(job, options, leader=leader)],
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": quantity(job.shm_bytes)}}],
    }


def _container(job: Job, options: KubernetesOptions, *, leader: bool) -> Manifest:
    host = ("server.host=0.0.0.0",) if job.default_host else ()
    container: Manifest = {
        "name": "kvlaunch",
        "image": options.image,
        "command": [_literal(word) for word in (*job.command, *host)],
    }
    if job.needs_secret:
        source = {"secretKeyRef": {"name": secret_name(job, options), "key": SECRET_KEY}}
        container["env"] = [{"name": env.SECRET, "valueFrom": source}]
    if leader:
        container["ports"] = [{"name": "http", "containerPort": job.plan.server.port, "protocol": "TCP"}]
        container |= _probes(job)
    return container | {
        "resources": _resources(job),
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
        # `kubectl describe pod` then shows kvlaunch's last words: whose failure came first.
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def _literal(word: str) -> str:
    """`word` as it is: Kubernetes replaces $(NAME) in a command, and $$ by $."""
    return word.replace("$", "$$")


def _probes(job: Job) -> Manifest:
    """Both engines answer on /health. Workers have none: their agents end with the leader's."""
    limits, rdzv = job.plan.timeouts, job.plan.rdzv
    start = math.ceil((rdzv.timeout_s + limits.ready_s) / _PERIOD_S)

    def probe(failures: int, period_s: int = _PERIOD_S) -> Manifest:
        asked = {"path": "/health", "port": "http"}
        return {"httpGet": asked, "periodSeconds": period_s, "timeoutSeconds": 5, "failureThreshold": failures}

    return {
        "startupProbe": probe(start),
        "readinessProbe": probe(3, 5),
        # The last resort: kvlaunch itself notices an engine that died or hangs, and while it starts that again
        # (max_restarts) nothing answers here.
        "livenessProbe": probe(start if job.plan.max_restarts else 6),
    }


def _resources(job: Job) -> Manifest:
    memory = quantity(job.memory_bytes)
    requests = {"cpu": str(job.cpus), "memory": memory}
    if job.plan.device == "cuda":
        # No limit of memory: pages of the weights' files count there, and are no reason to kill an engine.
        gpus = {"nvidia.com/gpu": str(job.ranks_per_node)}
        return {"requests": requests | gpus, "limits": gpus}
    return {"requests": requests, "limits": {"memory": memory}}


def quantity(nbytes: int) -> str:
    """Bytes as Kubernetes writes them, rounded up to whole MiB."""
    return f"{nbytes // GIB}Gi" if nbytes % GIB == 0 else f"{math.ceil(nbytes / _MIB)}Mi"
