"""The manifests: that the API server takes them, and that they say what the plan says."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from kvlaunch.errors import ConfigError
from kvlaunch.render.job import Job
from kvlaunch.render.kubernetes import KubernetesOptions, name_of, quantity, render
from kvlaunch.secret import Secret, new_secret
from tests.unit.render_jobs import AWKWARD, LARGE, TINY, TWO, job

SCHEMA = json.loads((Path(__file__).parents[1] / "data" / "kubernetes.schema.json").read_text())
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
IMAGE = "registry.example.com/kvlaunch-vllm:1"
JOBS = {
    "two nodes": (*LARGE, TWO),
    "one node": LARGE,
    "cpu": (*TINY, "pp=2", TWO),
    "static": (*TINY, "pp=2", TWO, "kv=static"),
    "awkward": (*TINY, "pp=2", TWO, *AWKWARD),
    "restarts": (*LARGE, TWO, "max_restarts=3", "name=7B of Qwen 3 with a name that is longer than labels can be"),
}


def text_of(made: Job, **options: Any) -> str:
    return render(made, KubernetesOptions(**{"image": IMAGE} | options))


def rendered(*overrides: str, **options: Any) -> dict[str, Any]:
    """Manifests by kind."""
    text = text_of(job(*overrides), **options)
    assert "&id" not in text  # people read it too
    documents = list(yaml.safe_load_all(text))
    found = {document["kind"]: document for document in documents}
    assert len(found) == len(documents)
    return found


def templates(*overrides: str, **options: Any) -> dict[str, Any]:
    template: dict[str, Any] = rendered(*overrides, **options)["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    return template


def container(template: dict[str, Any], whose: str = "leaderTemplate") -> dict[str, Any]:
    (only,) = template[whose]["spec"]["containers"]
    assert isinstance(only, dict)
    return only


def problems(document: dict[str, Any]) -> list[str]:
    return [error.message for error in VALIDATOR.iter_errors(document)]


@pytest.mark.parametrize(
    "options", [{}, {"namespace": "serving", "replicas": 3, "secret": "ours", "new_secret": "s" * 40}]
)
@pytest.mark.parametrize("name", JOBS)
def test_the_api_server_takes_them(name: str, options: dict[str, Any]) -> None:
    documents = rendered(*JOBS[name], **options)
    for document in documents.values():
        assert problems(document) == []
    assert {"LeaderWorkerSet", "Service"} <= documents.keys()


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "leaderWorkerTemplate", "size"), "2"),
        (("spec", "leaderWorkerTemplate", "restartPolicy"), "Always"),
        (("spec", "leaderWorkerTemplate", "leaderTemplate", "spec", "containers"), []),
        (("spec", "leaderWorkerTemplate", "workerTemplate"), None),
        (("spec", "leaderWorkerTemplate", "leaderTemplate", "spec", "nodes"), 2),
        (("spec", "startupPolicy"), "WorkersReady"),
        (("metadata", "name"), "Qwen3.8B"),
    ],
)
def test_the_schema_refuses_what_the_api_server_would(path: tuple[str, ...], value: Any) -> None:
    document = copy.deepcopy(rendered(*LARGE, TWO)["LeaderWorkerSet"])
    node = document
    for step in path[:-1]:
        node = node[step]
    node[path[-1]] = value
    assert problems(document)


def test_a_group_is_the_nodes_of_the_plan() -> None:
    documents = rendered(*LARGE, TWO, replicas=3)
    spec = documents["LeaderWorkerSet"]["spec"]
    template = spec["leaderWorkerTemplate"]
    assert (spec["replicas"], template["size"]) == (3, 2)
    assert template["restartPolicy"] == "RecreateGroupOnPodRestart"
    assert spec["startupPolicy"] == "LeaderCreated"
    for whose in ("leaderTemplate", "workerTemplate"):
        assert container(template, whose)["command"] == ["kvlaunch", "up", *LARGE, TWO, "server.host=0.0.0.0"]
        assert container(template, whose)["image"] == IMAGE


def test_a_group_of_one_is_a_leader() -> None:
    template = templates(*LARGE)
    assert template["size"] == 1
    assert "leaderTemplate" not in template
    alone = container(template, "workerTemplate")
    assert "readinessProbe" in alone
    assert "env" not in alone
    assert set(rendered(*LARGE, new_secret="s" * 40)) == {"Service", "LeaderWorkerSet"}


def test_gpus_of_a_pod() -> None:
    resources = container(templates(*LARGE, TWO))["resources"]
    assert resources["limits"] == {"nvidia.com/gpu": "2"}
    assert resources["requests"]["nvidia.com/gpu"] == "2"
    assert resources["requests"]["cpu"] == "10"


def test_memory_of_a_pod_is_that_of_the_plan() -> None:
    made = job(*TINY, "pp=2", TWO, "kv.reserve=3GiB")
    template = yaml.safe_load_all(text_of(made))
    (found,) = [d["spec"]["leaderWorkerTemplate"] for d in template if d["kind"] == "LeaderWorkerSet"]
    resources = container(found)["resources"]
    assert resources == {"requests": {"cpu": "10", "memory": "14Gi"}, "limits": {"memory": "14Gi"}}
    assert made.memory_bytes == 14 << 30
    (volume,) = found["leaderTemplate"]["spec"]["volumes"]
    assert volume["emptyDir"] == {"medium": "Memory", "sizeLimit": "2Gi"}
    assert container(found)["volumeMounts"] == [{"name": "shm", "mountPath": "/dev/shm"}]


@pytest.mark.parametrize(("nbytes", "text"), [(2 << 30, "2Gi"), (3 << 29, "1536Mi"), (1, "1Mi"), (10**9, "954Mi")])
def test_quantities(nbytes: int, text: str) -> None:
    assert quantity(nbytes) == text


def test_probes_ask_the_leaders_server() -> None:
    template = templates(*LARGE, TWO, "server.port=9000", "timeouts.ready_s=600", "rdzv.timeout_s=61")
    leader, worker = container(template), container(template, "workerTemplate")
    assert leader["ports"] == [{"name": "http", "containerPort": 9000, "protocol": "TCP"}]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert leader[probe]["httpGet"] == {"path": "/health", "port": "http"}
        assert probe not in worker
    startup = leader["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] == 670
    assert leader["livenessProbe"]["failureThreshold"] < 10
    assert "ports" not in worker


def test_an_engine_that_kvlaunch_starts_again_is_left_alone() -> None:
    leader = container(templates(*LARGE, TWO, "max_restarts=1"))
    assert leader["livenessProbe"]["failureThreshold"] == leader["startupProbe"]["failureThreshold"]


def test_time_to_end_is_that_of_the_plan() -> None:
    template = templates(*LARGE, TWO, "timeouts.drain_s=60.5", "timeouts.term_s=20")
    for whose in ("leaderTemplate", "workerTemplate"):
        spec = template[whose]["spec"]
        assert spec["terminationGracePeriodSeconds"] == 88
        assert (spec["enableServiceLinks"], spec["automountServiceAccountToken"]) == (False, False)


def test_the_service_stands_before_the_leaders() -> None:
    documents = rendered(*LARGE, TWO, "server.port=9000", namespace="serving")
    service, group = documents["Service"], documents["LeaderWorkerSet"]
    assert service["spec"] == {
        "selector": {
            "leaderworkerset.sigs.k8s.io/name": group["metadata"]["name"],
            "leaderworkerset.sigs.k8s.io/worker-index": "0",
        },
        "ports": [{"name": "http", "port": 9000, "targetPort": "http", "protocol": "TCP"}],
    }
    # The controller makes a headless service of the set's own name.
    assert service["metadata"]["name"] == "qwen3-8b-http" != group["metadata"]["name"]
    assert service["metadata"]["namespace"] == group["metadata"]["namespace"] == "serving"


def test_the_secret_is_asked_for_by_name() -> None:
    text = text_of(job(*LARGE, TWO), namespace="serving")
    assert (
        "#   kvlaunch secret new | kubectl create secret generic qwen3-8b-secret --namespace serving"
        " --from-file=secret=/dev/stdin\n"
    ) in text
    assert "kind: Secret" not in text
    expected = {"secretKeyRef": {"name": "qwen3-8b-secret", "key": "secret"}}
    for whose in ("leaderTemplate", "workerTemplate"):
        env = container(templates(*LARGE, TWO), whose)["env"]
        assert env == [{"name": "KVLAUNCH_SECRET", "valueFrom": expected}]


def test_a_secret_is_written_where_it_is_asked_for() -> None:
    text = new_secret().text
    documents = rendered(*LARGE, TWO, secret="ours", new_secret=text)
    secret = documents["Secret"]
    assert (secret["metadata"]["name"], secret["stringData"]) == ("ours", {"secret": text})
    assert Secret(secret["stringData"]["secret"]).text == text
    assert json.dumps(documents["LeaderWorkerSet"]).count(text) == 0
    assert "kubectl create secret" not in text_of(job(*LARGE, TWO), new_secret=text)


def test_no_secret_where_none_is_needed() -> None:
    for made in (job(*LARGE), job(*LARGE, TWO, "kv=static"), job(*LARGE, TWO, "rdzv.secret_file=/s/x")):
        text = text_of(made, new_secret="s" * 40)
        assert "secretKeyRef" not in text
        assert "kubectl create secret" not in text
        assert "kind: Secret" not in text


def expanded(word: str) -> str:
    """`word` as a container gets it: $(NAME) is a variable where there is one, $$ is $."""
    return re.sub(r"\$(\$|\((\w+)\))", lambda m: "$" if m[1] == "$" else f"<value of {m[2]}>", word)


def test_words_reach_the_container_as_they_are() -> None:
    overrides = (*TINY, "pp=2", TWO, *AWKWARD, "engine.env.E=$(PATH) $$(PATH) $$$ $(")
    command = container(templates(*overrides))["command"]
    assert [expanded(word) for word in command] == ["kvlaunch", "up", *overrides, "server.host=0.0.0.0"]
    assert expanded("$(PATH)") == "<value of PATH>"


def test_the_head_is_all_comment() -> None:
    text = text_of(job(*TINY, "pp=2", TWO, *AWKWARD))
    head = text[: text.index("apiVersion:")]
    assert all(line.startswith("# ") for line in head.splitlines())
    assert "tp 1 x pp 2 = 2 ranks, 1 on each of 2 nodes" in head


def test_what_the_image_must_hold_is_said(tmp_path: Path) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    text = text_of(job(*LARGE, TWO, "model.path=/models/q", config_dir=folder))
    assert f"# The image, or a volume of yours, must hold: /models/q, {folder}\n" in text
    assert "must hold" not in text_of(job(*LARGE, TWO))
    assert "must hold" not in text_of(job(*TINY))


def test_an_address_of_the_users_own_is_kept() -> None:
    command = container(templates(*LARGE, TWO, "server.host=::"))["command"]
    assert [word for word in command if word.startswith("server.host=")] == ["server.host=::"]


@pytest.mark.parametrize(
    ("overrides", "options", "message"),
    [
        ((), {"image": ""}, "render kubernetes needs --image"),
        (("server.port=0",), {}, "server.port=0: probes and the Service need a port that is known."),
        (("server.host=127.0.0.1",), {}, "server.host=127.0.0.1: neither probes nor the Service reach"),
        ((), {"image": "two words"}, "--image 'two words': that is no name of an image."),
        ((), {"namespace": "Mine"}, "--namespace 'Mine': Kubernetes takes small letters"),
        ((), {"secret": "a_b"}, "--secret 'a_b': Kubernetes takes small letters"),
        ((), {"replicas": 0}, "--replicas 0: must be at least 1."),
    ],
)
def test_what_cannot_be_rendered(overrides: tuple[str, ...], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        text_of(job(*LARGE, *overrides), **options)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("Qwen3-8B", "qwen3-8b"),
        ("7B", "run-7b"),
        ("My run #3", "my-run-3"),
        ("ä", "run"),
        ("x" * 39 + "-y", "x" * 39),
        ("1" * 50, f"run-{'1' * 36}"),
    ],
)
def test_names_are_labels(given: str, name: str) -> None:
    assert name_of(job(*LARGE, f"name={given}")) == name
