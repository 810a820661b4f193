"""Places in a group of nodes, from the variables of SLURM and of a LeaderWorkerSet."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from kvlaunch.cli.main import main
from kvlaunch.config.compose import compose
from kvlaunch.errors import ConfigError
from kvlaunch.launch.cluster_env import Found, expand_hosts, recognise, slurm_port

STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_STEPID": "0",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NODELIST": "gpu[07-08],cpu5",
    "SLURM_NODEID": "1",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_NNODES": "4",
    "SLURM_JOB_NODELIST": "gpu[06-08],cpu5",
}
"""As srun sets them for the second task of a step on three of a job's four nodes."""
POD = {"LWS_LEADER_ADDRESS": "vllm-0.vllm.default", "LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1"}


def found(environ: dict[str, str]) -> Found:
    result = recognise(environ)
    assert result is not None
    return result


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


def test_a_step_of_slurm() -> None:
    assert found(STEP).defaults({}) == {
        "nnodes": 3,
        "node_rank": 1,
        "rdzv.endpoint": "gpu07:24711",
        "rdzv.id": "slurm-4711",
        "rdzv.backend": "c10d",
    }


def test_the_variables_of_the_job_where_the_step_has_none() -> None:
    environ = without(STEP, "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS")
    assert found(environ).defaults({}) | {"rdzv.id": 0} == {
        "nnodes": 4,
        "node_rank": 1,
        "rdzv.endpoint": "gpu06:24711",
        "rdzv.id": 0,
        "rdzv.backend": "c10d",
    }
    old = without(environ, "SLURM_JOB_NUM_NODES", "SLURM_JOB_NODELIST", "SLURM_STEP_ID") | {"SLURM_NODELIST": "a[1-4]"}
    assert found(old).settings["nnodes"].origin == "SLURM_NNODES"
    assert found(old).settings["rdzv.endpoint"].value == "a1:24711"


def test_steps_of_one_job_do_not_meet() -> None:
    first, second = found(STEP), found(STEP | {"SLURM_STEP_ID": "1"})
    for key in ("rdzv.endpoint", "rdzv.id"):
        assert first.settings[key].value != second.settings[key].value
    assert len({slurm_port(job, step) for job in range(100) for step in range(5)}) == 500
    assert all(20000 <= slurm_port(job) < 30000 for job in (1, 9999, 10000, 67108863, 4294967295))


def test_all_nodes_of_a_step_agree() -> None:
    seen = [found(STEP | {"SLURM_NODEID": str(rank)}).defaults({}) for rank in range(3)]
    assert [settings.pop("node_rank") for settings in seen] == [0, 1, 2]
    assert seen[0] == seen[1] == seen[2]


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"PATH": "/bin"},
        without(STEP, "SLURM_STEP_ID", "SLURM_STEPID"),
        without(STEP, "SLURM_JOB_ID"),
        STEP | {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "gpu07", "SLURM_NODEID": "0"},
        STEP | {"SLURM_HET_SIZE": "2"},
        POD | {"LWS_GROUP_SIZE": "1", "LWS_WORKER_INDEX": "0"},
        without(POD, "LWS_LEADER_ADDRESS"),
    ],
    ids=[
        "nothing",
        "no cluster",
        "batch script",
        "no job",
        "step of one",
        "heterogeneous",
        "group of one",
        "no leader",
    ],
)
def test_nothing_is_recognised(environ: dict[str, str]) -> None:
    assert recognise(environ) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"SLURM_STEP_NUM_TASKS": "6"}, "SLURM started 6 tasks on 3 nodes (SLURM_STEP_NUM_TASKS)"),
        ({"SLURM_STEP_NODELIST": "gpu[07-09"}, "SLURM_STEP_NODELIST='gpu[07-09' is no list of hosts"),
        ({"SLURM_STEP_NODELIST": "gpu07"}, "SLURM_STEP_NODELIST=gpu07 names 1 hosts, and SLURM_STEP_NUM_NODES says 3."),
        ({"SLURM_STEP_NUM_NODES": "three"}, "SLURM_STEP_NUM_NODES='three': a whole number was expected there."),
        ({"SLURM_NODEID": ""}, "SLURM_NODEID='': a whole number was expected there."),
        ({"SLURM_NODEID": "3"}, "SLURM_NODEID=3 does not fit SLURM_STEP_NUM_NODES=3."),
    ],
)
def test_what_slurm_says_must_fit_together(change: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        recognise(STEP | change)
    assert caught.value.hint


def test_a_pod_of_a_leader_worker_set() -> None:
    assert found(POD).defaults({}) == {
        "nnodes": 2,
        "node_rank": 1,
        "rdzv.endpoint": "vllm-0.vllm.default:29400",
        "rdzv.id": "vllm-0.vllm.default",
        "rdzv.backend": "c10d",
    }
    assert found(POD | {"LWS_LEADER_ADDRESS": "fd00::1"}).settings["rdzv.endpoint"].value == "[fd00::1]:29400"
    with pytest.raises(ConfigError, match="LWS_WORKER_INDEX=2 does not fit LWS_GROUP_SIZE=2"):
        recognise(POD | {"LWS_WORKER_INDEX": "2"})


def test_groups_of_long_names_keep_apart() -> None:
    stem = "a" * 70
    ids = [found(POD | {"LWS_LEADER_ADDRESS": f"{stem}-{i}.{stem}.ns"}).settings["rdzv.id"].value for i in range(2)]
    assert ids[0] != ids[1]
    assert all(len(str(text)) == 64 for text in ids)


def test_a_pod_on_a_node_of_slurm_is_a_pod() -> None:
    assert found(STEP | POD).where == "LeaderWorkerSet group vllm-0.vllm.default"


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ({"tp": 2}, {"nnodes", "node_rank", "rdzv.endpoint", "rdzv.id", "rdzv.backend"}),
        ({"nnodes": 3}, {"node_rank", "rdzv.endpoint", "rdzv.id", "rdzv.backend"}),
        ({"rdzv.endpoint": "h:1", "node_rank": 0}, {"nnodes", "rdzv.id", "rdzv.backend"}),
        ({"rdzv.backend": "static", "rdzv.id": "x"}, {"nnodes", "node_rank", "rdzv.endpoint"}),
        ({"nnodes": 1}, set()),
        ({"nnodes": 4}, set()),
    ],
)
def test_what_the_user_gives_wins(given: dict[str, object], left: set[str]) -> None:
    assert set(found(STEP).defaults(given)) == left


def test_the_line_tells_where_each_came_from() -> None:
    line = found(STEP).line
    assert line.startswith("step 4711.0 of SLURM: nnodes=3 (SLURM_STEP_NUM_NODES), node_rank=1 (SLURM_NODEID), ")
    assert "rdzv.endpoint=gpu07:24711 (first host of SLURM_STEP_NODELIST, port from SLURM_JOB_ID)" in line


@pytest.mark.parametrize("environ", [STEP, POD, POD | {"LWS_LEADER_ADDRESS": "fd00::1"}], ids=["slurm", "lws", "ipv6"])
def test_values_are_such_as_the_config_takes(environ: dict[str, str]) -> None:
    defaults = found(environ).defaults({})
    config = compose(["model=tiny-qwen3", *(f"{key}={value}" for key, value in defaults.items())]).config
    rdzv = config.rdzv
    assert defaults == {
        "nnodes": config.nnodes,
        "node_rank": config.node_rank,
        "rdzv.endpoint": rdzv.endpoint,
        "rdzv.id": rdzv.id,
        "rdzv.backend": rdzv.backend.value,
    }


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("n1,n2", ["n1", "n2"]),
        ("gpu[01-03,07],cpu5", ["gpu01", "gpu02", "gpu03", "gpu07", "cpu5"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("n[098-101]-ib.local", ["n098-ib.local", "n099-ib.local", "n100-ib.local", "n101-ib.local"]),
        ("r[1-2]n[1,3]", ["r1n1", "r1n3", "r2n1", "r2n3"]),
        ("[1-2]", ["1", "2"]),
        ("b,a[2,1]", ["b", "a2", "a1"]),
    ],
)
def test_lists_of_hosts(text: str, names: list[str]) -> None:
    assert expand_hosts(text) == names


@pytest.mark.parametrize(
    "text",
    ["", ",", "a,", "a,,b", "a[1", "a]1[", "a[]", "a[1-]", "a[2-1]", "a[x]", "a[1,[2]]", "a b", "a[0-999999999]"],
)
def test_no_lists_of_hosts(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        expand_hosts(text)


def test_a_list_that_would_fill_the_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="more than 65536 hosts"):
        expand_hosts("a[1-60000]b[1-60000]c[1-60000]")


SRUN = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_NODELIST": "gpu[01-02]",
    "SLURM_NODEID": "1",
}


def planned(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *overrides: str) -> tuple[Any, str]:
    """What `kvlaunch plan` shows inside a step of SLURM, and what it says on standard error."""
    for name, value in SRUN.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        main(["plan", "--json", "model=tiny-qwen3", "pp=2", "device=cpu", *overrides])
    assert ended.value.code == 0
    out, err = capsys.readouterr()
    return json.loads(out), err


def test_a_plan_takes_what_the_cluster_tells(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made, err = planned(monkeypatch, capsys)
    assert (made["nnodes"], made["rdzv"]["node_rank"], made["run"]) == (2, 1, "slurm-4711")
    assert made["rdzv"]["endpoint"] == "gpu01:24711"
    assert "SLURM_NODEID" in err


def test_what_the_user_says_wins_over_the_cluster(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made, _ = planned(monkeypatch, capsys, "rdzv.endpoint=10.0.0.1:29400", "node_rank=0")
    assert (made["rdzv"]["endpoint"], made["rdzv"]["node_rank"]) == ("10.0.0.1:29400", 0)
    made, err = planned(monkeypatch, capsys, "nnodes=1")
    assert (made["nnodes"], err) == (1, "")
