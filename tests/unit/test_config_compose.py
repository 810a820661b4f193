"""Composition: what overrides may look like, and what they become."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvlaunch.config.compose import Composed, compose
from kvlaunch.config.groups import Groups
from kvlaunch.config.schema import DeviceName, EngineName, KVModeName, LaunchConfig
from kvlaunch.errors import ConfigError

TINY = "model=tiny-qwen3"


def composed(*overrides: str) -> LaunchConfig:
    return compose([TINY, *overrides]).config


def with_file(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return folder


def test_defaults() -> None:
    config = composed()
    assert isinstance(config, LaunchConfig)
    assert (config.engine.name, config.kv.mode, config.device.name) == (
        EngineName.vllm,
        KVModeName.elastic,
        DeviceName.auto,
    )
    assert (config.tp, config.pp, config.nnodes, config.kv.reserve) == (1, 1, 1, 2 << 30)


def test_sizes_become_bytes() -> None:
    config = composed("kv.reserve=1.5GiB", "kv.page=64KiB", "kv.cache.keep=1e6")
    assert (config.kv.reserve, config.kv.page, config.kv.cache.keep) == (3 << 29, 65536, 10**6)
    assert composed("kv.reserve=4096", "kv.page=null").kv.page is None


@pytest.mark.parametrize(
    ("override", "path", "name"),
    [
        ("model=/data/a=b", "/data/a=b", "a=b"),
        ("model=/data/x, y", "/data/x, y", "x, y"),
        ("model=/data/#1 {ä}", "/data/#1 {ä}", "#1 {ä}"),
        ("model='/data/a b'", "/data/a b", "a b"),
        ("model=org/Name-7B_x.y", "org/Name-7B_x.y", "org/Name-7B_x.y"),
    ],
)
def test_model_that_is_no_choice(override: str, path: str, name: str) -> None:
    model = compose([override]).config.model
    assert (model.path, model.name, model.num_layers) == (path, name, None)


def test_local_model_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    (tmp_path / "bare").mkdir()
    assert compose(["model=./m"]).config.model.path == str(tmp_path / "m")
    assert compose(["model=../m"]).config.model.path == str(tmp_path.parent / "m")
    assert compose(["model=bare"]).config.model.path == str(tmp_path / "bare")
    assert compose(["model=~/m"]).config.model.path == "/home/somebody/m"
    assert compose(["model=."]).config.model.name == tmp_path.name


def test_known_hub_id_brings_its_numbers() -> None:
    model = compose(["model=Qwen/Qwen3-8B"]).config.model
    assert (model.name, model.path, model.num_layers) == ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B", 36)


def test_model_by_its_path_alone() -> None:
    model = compose(["model.path=gpt2"]).config.model
    assert (model.name, model.path) == ("gpt2", "gpt2")
    model = compose(["model.path=gpt2", "model.name=mine"]).config.model
    assert (model.name, model.path) == ("mine", "gpt2")


def test_the_last_one_wins() -> None:
    config = compose(["model=Qwen/Qwen3-8B", "tp=2", "engine=sglang", "model=org/other", "tp=4", "engine=vllm"]).config
    assert (config.model.name, config.model.num_layers, config.tp) == ("org/other", None, 4)
    assert config.engine.name is EngineName.vllm


@pytest.mark.parametrize("text", ["None", "1.10", "true", "007", "1e5", "ä#1", "a=b", "on", "1_000"])
def test_text_stays_as_typed(text: str) -> None:
    config = composed(f"name={text}", f"engine.env.X={text}", f"model.name={text}")
    assert (config.name, config.engine.env["X"], config.model.name) == (text, text, text)


@pytest.mark.parametrize(
    ("typed", "value"),
    [
        ("4096", 4096),
        ("-1", -1),
        ("0.9", 0.9),
        ("1.10", "1.10"),
        ("007", "007"),
        ("1e5", "1e5"),
        ("None", "None"),
        ("true", True),
        ("False", False),
        ("null", None),
        ("'true'", "true"),
        ('"4096"', "4096"),
        ("", ""),
        ("/x/y=z.jinja", "/x/y=z.jinja"),
        ("https://h/p?a=b&c=d#e", "https://h/p?a=b&c=d#e"),
        ('{"a":1}', {"a": 1}),
        ('{"a": {"b": [1, "2", 1.5, null]}}', {"a": {"b": [1, "2", 1.5, None]}}),
        ('{"ä b": "=#"}', {"ä b": "=#"}),
        ("{a: 1, b: 1.10, c: x}", {"a": 1, "b": "1.10", "c": "x"}),
        ("{a:1}", {"a": 1}),
        ("[1, two]", [1, "two"]),
        ("[unfinished", "[unfinished"),
        ("{unfinished", "{unfinished"),
        ("0-3,4-7", "0-3,4-7"),
        ("a b\nc", "a b\nc"),
        ("it's", "it's"),
        ("back\\slash", "back\\slash"),
    ],
)
def test_engine_arguments_take_any_value(typed: str, value: object) -> None:
    args = composed(f"engine.args.option={typed}").engine.args
    assert args == {"option": value}
    assert type(args["option"]) is type(value)


def test_engine_arguments_and_variables() -> None:
    config = composed(
        "engine.args.max-model-len=8",
        "engine.args.hf_overrides.rope.theta=2",
        "+engine.args.plus=1",
        "++engine.args.plus2=1",
        "engine.env.CUDA_VISIBLE_DEVICES=0,1",
        "engine.env.GONE=null",
        "engine.python=/opt/e=1/bin/python",
    )
    assert config.engine.args == {"max_model_len": 8, "hf_overrides": {"rope": {"theta": 2}}, "plus": 1, "plus2": 1}
    assert config.engine.env == {"CUDA_VISIBLE_DEVICES": "0,1", "GONE": None}
    assert config.engine.python == "/opt/e=1/bin/python"


def test_engine_argument_taken_out() -> None:
    assert composed("engine.args.a=1", "engine.args.b=2", "~engine.args.a").engine.args == {"b": 2}
    with pytest.raises(ConfigError, match=r"engine\.args\.c is not set"):
        composed("~engine.args.c")


@pytest.mark.parametrize("typed", ["--tp=2", "+tp=2", "++tp=2", "tp='2'", "tp=+2"])
def test_other_spellings_of_an_override(typed: str) -> None:
    assert composed(typed).tp == 2


def test_dashes_of_an_option_become_underscores() -> None:
    assert composed("--node-rank=0").node_rank == 0


def test_mappings() -> None:
    config = composed(
        "server={port: 9, host: localhost}", 'kv.ahead={"low": 1}', "engine.env={A: 1.10}", "engine.args={a: 1}"
    )
    assert (config.server.port, config.server.host, config.kv.ahead.low) == (9, "localhost", 1)
    assert (config.engine.env, config.engine.args) == ({"A": "1.10"}, {"a": 1})


def test_interpolation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHO", "me")
    config = composed("name=${oc.env:WHO}", "engine.args.a=${tp}", "engine.args.b=\\${tp}", "tp=2")
    assert (config.name, config.engine.args) == ("me", {"a": 2, "b": "${tp}"})


@pytest.mark.parametrize("typed", ["true", "yes", "ON", "1"])
def test_booleans(typed: str) -> None:
    assert composed("kv.guard=false", f"kv.guard={typed}").kv.guard is True


def test_own_groups_win_and_presets_go_together(tmp_path: Path) -> None:
    own = tmp_path / "it's my\nfolder {1}"
    with_file(own, "model/mine.yaml", "defaults: [Qwen3-8B, _self_]\nname: mine\npath: /data/mine\n")
    with_file(own, "kv/static.yaml", "mode: static\nreserve: 3GiB\n")
    with_file(
        own,
        "preset/big.yaml",
        "defaults:\n  - override /model: mine\n  - override /kv: static\n"
        "tp: 4\nkv:\n  cache:\n    keep: 1GiB\nengine:\n  args:\n    seed: 1\n    x: {y: 1}\n",
    )
    result = compose(["preset=big", "pp=2", "engine.args.seed=2"], config_dir=own)
    config = result.config
    assert (config.model.name, config.model.num_layers, config.tp, config.pp) == ("mine", 36, 4, 2)
    assert (config.kv.mode, config.kv.reserve, config.kv.cache.keep) == (KVModeName.static, 3 << 30, 1 << 30)
    assert config.engine.args == {"seed": 2, "x": {"y": 1}}
    assert result.origin("model.name") == str(own / "model/mine.yaml")
    assert result.origin("model.num_layers") == "model/Qwen3-8B.yaml"
    assert result.origin("kv.reserve") == str(own / "kv/static.yaml")
    assert result.origin("tp") == str(own / "preset/big.yaml")
    assert result.origin("engine.args.seed") == "engine.args.seed=2"
    assert compose(["+preset=big", "model=tiny-qwen3", "tp=1"], config_dir=own).config.model.tiny is True
    assert compose(["preset=big", "model=org/other"], config_dir=own).config.model.num_layers is None


def test_origins() -> None:
    result = compose(["model=/data/m", "--tp=2", "kv.reserve=1GiB", 'engine.args.o={"a":{"b":1}}'])
    expected = {
        "tp": "--tp=2",
        "pp": "default",
        "kv.reserve": "kv.reserve=1GiB",
        "kv.mode": "kv/elastic.yaml",
        "model.name": "model=/data/m",
        "model.path": "model=/data/m",
        "model.dtype": "default",
        "engine.args.o.a.b": 'engine.args.o={"a":{"b":1}}',
    }
    assert {key: result.origin(key) for key in expected} == expected


def test_container_is_plain() -> None:
    container = compose([TINY, "engine.args.a={b: [1]}"]).container
    assert container["engine"] == {"name": "vllm", "python": None, "args": {"a": {"b": [1]}}, "env": {}}
    assert container["kv"]["reserve"] == 2 << 30


def test_composing_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hydra.core.global_hydra import GlobalHydra

    monkeypatch.chdir(tmp_path)
    handlers = list(logging.getLogger().handlers)
    results = [compose([TINY, f"tp={n}"]) for n in (1, 2, 3)]
    assert [r.config.tp for r in results] == [1, 2, 3]
    assert not GlobalHydra.instance().is_initialized()
    assert logging.getLogger().handlers == handlers
    assert list(tmp_path.iterdir()) == []


def test_inside_an_application_of_hydra(tmp_path: Path) -> None:
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        outer = GlobalHydra.instance().hydra
        assert composed("tp=2").tp == 2
        assert GlobalHydra.instance().hydra is outer
    GlobalHydra.instance().clear()


@pytest.mark.parametrize("name", ["with spaces", 'it\'s "quoted"', "new\nline", "br{a}ce=#,", "ünï"])
def test_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    monkeypatch.chdir(folder)
    assert composed("tp=2").tp == 2
    own = with_file(folder, "own/model/mine.yaml", "name: mine\npath: /m\n") / "own"
    assert compose(["model=mine"], config_dir=Path("own")).config.model.path == "/m"
    assert compose(["model=./m"], config_dir=own).config.model.path == str(folder / "m")


def every_model() -> list[str]:
    return list(Groups.at(None).choices("model"))


# Parameters that the publishers state (embeddings included), in billions.
PARAMETERS = {
    "Qwen3-0.6B": 0.596,
    "Qwen3-1.7B": 1.721,
    "Qwen3-4B": 4.022,
    "Qwen3-8B": 8.191,
    "Qwen3-14B": 14.768,
    "Qwen3-32B": 32.762,
    "Qwen3-30B-A3B": 30.532,
    "Qwen3-235B-A22B": 235.094,
    "Llama-3.1-8B": 8.030,
    "Llama-3.1-8B-Instruct": 8.030,
    "Llama-3.1-70B": 70.554,
    "Llama-3.1-70B-Instruct": 70.554,
    "Llama-3.1-405B": 405.853,
    "Llama-3.2-1B": 1.236,
    "Llama-3.2-3B": 3.213,
    "Llama-3.3-70B-Instruct": 70.554,
    "Mistral-7B-v0.3": 7.248,
    "Mixtral-8x7B-v0.1": 46.703,
}


@pytest.mark.parametrize("name", every_model())
def test_every_model_has_all_its_numbers(name: str) -> None:
    m = compose([f"model={name}"]).config.model
    numbers = (
        m.num_layers,
        m.hidden_size,
        m.intermediate_size,
        m.num_heads,
        m.num_kv_heads,
        m.head_dim,
        m.vocab_size,
        m.max_context,
    )
    assert all(isinstance(n, int) and n > 0 for n in numbers)
    layers, hidden, intermediate, heads, kv_heads, head_dim, vocab, _ = (n or 0 for n in numbers)
    assert m.name == name
    assert m.architecture is not None
    assert m.architecture.endswith("ForCausalLM")
    assert heads % kv_heads == 0
    if m.tiny:
        assert m.path is None
        return
    attention = hidden * head_dim * 2 * (heads + kv_heads)
    experts, width = (m.num_experts, m.moe_intermediate_size) if m.num_experts else (1, intermediate)
    mlp = experts * 3 * hidden * width
    total = layers * (attention + mlp) + vocab * hidden * (1 if m.tie_word_embeddings else 2)
    assert total / 1e9 == pytest.approx(PARAMETERS[name], rel=2e-3)


@pytest.mark.parametrize("group", ["engine", "kv", "device", "cluster"])
def test_every_choice_composes(group: str) -> None:
    for name in Groups.at(None).choices(group):
        value = getattr(composed(f"{group}={name}"), group)
        assert str(getattr(value, "mode", None) or value.name).rpartition(".")[2] == name


def test_groups_match_the_schema() -> None:
    groups = Groups.at(None)
    assert list(groups.choices("engine")) == ["sglang", "vllm"]
    assert list(groups.choices("kv")) == ["elastic", "static"]
    assert list(groups.choices("device")) == ["auto", "cpu", "cuda"]
    assert list(groups.choices("cluster")) == ["local"]
    assert {"tiny-qwen3", "Qwen3-0.6B", "Qwen3-8B"} <= set(groups.choices("model"))


def test_the_wheel_carries_the_groups(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "dist")]
    subprocess.run(build, cwd=root, check=True, capture_output=True, timeout=100)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    code = (
        "from kvlaunch.config.groups import shipped_dir; from kvlaunch.config.compose import compose;"
        "print(shipped_dir()); print(compose(['model=Qwen3-8B']).config.model.num_layers)"
    )
    place = tmp_path / "site"
    subprocess.run([sys.executable, "-m", "zipfile", "-e", str(wheel), str(place)], check=True, timeout=60)
    env = {**os.environ, "PYTHONPATH": str(place)}
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, check=True, capture_output=True, text=True, timeout=60
    ).stdout.splitlines()
    assert out == [str(place / "kvlaunch" / "_conf"), "36"]


def test_composed_is_what_the_docs_say() -> None:
    result = compose([TINY])
    assert isinstance(result, Composed)
    assert result.config is not compose([TINY]).config
