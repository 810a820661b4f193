"""What is refused, and what the message says: the value, the rule, what to write instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvlaunch.config.compose import compose
from kvlaunch.errors import ConfigError

TINY = "model=tiny-qwen3"


def refused(*overrides: str, config_dir: Path | None = None) -> ConfigError:
    with pytest.raises(ConfigError) as e:
        compose(list(overrides), config_dir=config_dir)
    return e.value


# override, what the message says, what the hint says
TYPED = [
    ("tpp=2", "There is no key 'tpp'.", "Did you mean tp=2?"),
    ("modle=Qwen3-8B", "There is no key 'modle'.", "Did you mean model=Qwen3-8B?"),
    ("kv.reserv=1GiB", "There is no key 'kv.reserv'.", "Did you mean kv.reserve=1GiB?"),
    ("server.prot=1", "There is no key 'server.prot'.", "Did you mean server.port=1?"),
    ("kv.cache.idle=3", "There is no key 'kv.cache.idle'.", "Did you mean kv.cache.idle_s=3?"),
    ("kvs.reserve=3", "There is no key 'kvs.reserve'.", "Did you mean kv.reserve=3?"),
    ("port=1", "There is no key 'port'.", "Did you mean server.port=1?"),
    ("tensor-parallel-size=2", "There is no key 'tensor-parallel-size'.", "Did you mean tp=2?"),
    ("--pipeline-parallel-size=2", "There is no key 'pipeline_parallel_size'.", "Did you mean pp=2?"),
    ("kv.block-size=2", "There is no key 'kv.block-size'.", "Did you mean kv.block_size=2?"),
    ("server={prot: 1}", "There is no key 'server.prot'.", "Did you mean server.port?"),
    ("max_model_len=4", "There is no key 'max_model_len'.", "engine.args.max_model_len=4"),
    ("CUDA_VISIBLE_DEVICES=0", "There is no key 'CUDA_VISIBLE_DEVICES'.", "engine.env.CUDA_VISIBLE_DEVICES=0"),
    ("server.zzz=1", "There is no key 'server.zzz'.", "server has: host, port."),
    ("hydra.run.dir=x", "hydra.run.dir=x: Hydra's own settings have no effect here.", "no outputs/ folder"),
    ("tp=two", "tp wants a whole number, got 'two'.", "For example: tp=2"),
    ("tp=2.0", "tp wants a whole number, got '2.0'.", "For example: tp=2"),
    ("tp=", "tp wants a whole number, got ''.", "For example: tp=2"),
    ("tp==2", "tp wants a whole number, got '=2'.", "For example: tp=2"),
    ("tp=null", "tp cannot be null: it wants a whole number.", "Leave it out"),
    ("node_rank=None", "node_rank wants a whole number, or null, got 'None'.", "For example: node_rank=0"),
    ("kv.guard=maybe", "kv.guard wants true or false, got 'maybe'.", "For example: kv.guard=true"),
    ("timeouts.ready_s=5m", "timeouts.ready_s wants a number, got '5m'.", "For example: timeouts.ready_s=1800.0"),
    ("timeouts.ready_s=nan", "timeouts.ready_s wants a number, got 'nan'.", "For example"),
    ("kv.mode=elstic", "kv.mode wants one of elastic, static, got 'elstic'.", "Did you mean kv.mode=elastic?"),
    ("kv.reserve=two", "kv.reserve wants a size in bytes, got 'two'.", "Write 2GiB, 512MiB, 1.5GiB, 10GB"),
    ("kv.page=x", "kv.page wants a size in bytes, got 'x'.", "or null"),
    ("server=1", "server has keys of its own, so '1' cannot be its value.", "server.KEY=VALUE"),
    ("engine.args=1", "engine.args has keys of its own, so '1' cannot be its value.", "engine.args.KEY=VALUE"),
    ("engine.env.0X=1", "engine.env.0X: '0X' cannot be the name of an environment variable.", "engine.env.NAME=VALUE"),
    ("name=???", "name=??? means a value that is missing.", "name wants text, or null."),
    ("=2", "'=2': a key is missing before the '='.", "tp=2"),
    ("a b=2", "'a b=2': 'a b' is no key.", "kv.reserve"),
    ("engine=null", "engine=null: there is no such engine.", "Choices: sglang, vllm."),
    ("engine=", "engine=: there is no such engine.", "Choices: sglang, vllm."),
    ("engine=vlm", "engine=vlm: there is no such engine.", "Did you mean engine=vllm? Choices: sglang, vllm."),
    ("device=gpu", "device=gpu: there is no such device.", "Choices: auto, cpu, cuda."),
    ("kv=none", "kv=none: there is no such kv.", "Choices: elastic, static."),
    ("model=qwen3-8b", "model=qwen3-8b: there is no such model.", "Did you mean model=Qwen3-8B?"),
    ("model=Qwen3-8", "model=Qwen3-8: there is no such model.", "Or a hub id (Qwen/Qwen3-8B), or a local folder"),
    ("model=a/b/c", "model=a/b/c: there is no such model.", "a local folder starts with / or ./ or ~/"),
    ("preset=x", "preset=x: there are no presets.", "DIR/preset/x.yaml"),
    ("~engine", "~engine: a launch needs one choice of the group engine.", "engine=CHOICE"),
    ("~tp", "~tp: tp cannot be taken out, only changed.", "tp=VALUE"),
    ("~zzz.y", "There is no key 'zzz.y'.", "The config has: engine"),
    ("tp", "'tp' has no value.", "Write tp=VALUE, without spaces."),
    ("vllm", "'vllm' is not an override.", "Did you mean engine=vllm?"),
    ("Qwen3-8B", "'Qwen3-8B' is not an override.", "Did you mean model=Qwen3-8B?"),
    ("Qwen/Qwen3-8B", "'Qwen/Qwen3-8B' is not an override.", "model=Qwen/Qwen3-8B"),
    ("~/m x", "'~/m x': '/m x' is no key.", "kv.reserve"),
    ("zzz", "'zzz' is neither a verb nor an override.", "KEY=VALUE"),
    ("--tensor-parallel-size", "There is no option '--tensor-parallel-size'.", "tp=VALUE"),
    ("--max-model-len", "There is no option '--max-model-len'.", "engine.args.max_model_len=VALUE"),
    ("-x", "There is no option '-x'.", "--help"),
    ("--", "There is no option '--'.", "Leave it out"),
    ("name=\udcff", "'name=\\udcff' is not UTF-8.", "UTF-8"),
]


@pytest.mark.parametrize(("override", "message", "hint"), TYPED, ids=[ascii(t[0]) for t in TYPED])
def test_message(override: str, message: str, hint: str) -> None:
    error = refused(TINY, override)
    assert error.message == message
    assert hint in (error.hint or "")
    assert error.exit_code == 2


@pytest.mark.parametrize("override", ["tp=1,2", "tp=range(1,4)", "engine=vllm,sglang", "kv.mode=elastic,static"])
def test_sweeps_are_refused(override: str) -> None:
    error = refused(TINY, override)
    assert error.message == f"{override}: kvlaunch makes one launch a command, no sweeps."


@pytest.mark.parametrize("override", ["model=Qwen3-8B,Qwen3-4B", "model=choice(Qwen3-8B,Qwen3-4B)"])
def test_sweeps_over_models_are_refused(override: str) -> None:
    assert "no sweeps" in refused(override).message


@pytest.mark.parametrize("option", ["-m", "--multirun"])
def test_multirun_is_refused(option: str) -> None:
    assert "no sweeps" in refused(option, TINY, "tp=1,2").message


def test_spaces_around_the_equals_sign() -> None:
    error = refused(TINY, "tp", "=", "2")
    assert (error.message, error.hint) == ("'tp = 2': an override has no spaces.", "Write tp=2")


@pytest.mark.parametrize("overrides", [[], ["tp=2"], ["model="], ["model=null"]])
def test_no_model(overrides: list[str]) -> None:
    error = refused(*overrides)
    assert error.message == "No model is given."
    for way in ("model=Qwen/Qwen3-8B", "model=/data/m", "Qwen3-8B", "model=tiny-qwen3 needs no download"):
        assert way in (error.hint or "")


IMPOSSIBLE = [
    (["tp=0"], "tp=0: must be at least 1.", "tp=1"),
    (["pp=-1"], "pp=-1: must be at least 1.", "pp=1"),
    (["nnodes=0"], "nnodes=0: must be at least 1.", "nnodes=1"),
    (["max_restarts=-1"], "max_restarts=-1: must not be negative.", "0"),
    (["server.port=65536"], "server.port=65536: a port is 0 to 65535.", "server.port=0 for any free one"),
    (["server.host="], "server.host='': must be a host name or an address.", "0.0.0.0"),
    (["server.host=http://x"], "server.host='http://x': must be a host name or an address.", "127.0.0.1"),
    (["kv.reserve=0"], "kv.reserve=0: must be more than 0 bytes.", "kv.reserve=2GiB"),
    (["kv.reserve=1PiB"], "kv.reserve=1PiB: a process has at most 128TiB of address space.", "kv.reserve=2GiB"),
    (["kv.page=0"], "kv.page=0: must be more than 0 bytes.", "smallest"),
    (["kv.page=4GiB"], "kv.page=4GiB is larger than kv.reserve=2GiB.", "inside the reserve"),
    (["kv.block_size=0"], "kv.block_size=0: must be at least 1 token.", "kv.block_size=16"),
    (["kv.ahead.low=20"], "kv.ahead.low=20 and kv.ahead.high=16: low must be 0 or more", "kv.ahead.high=20"),
    (["kv.ahead.low=-1"], "kv.ahead.low=-1 and kv.ahead.high=16: low must be 0 or more", "kv.ahead.low=0"),
    (["timeouts.ready_s=0"], "timeouts.ready_s=0: must be more than 0 (seconds).", "timeouts.ready_s=30"),
    (["timeouts.ready_s=inf"], "timeouts.ready_s=inf: must be a finite number of seconds.", "timeouts.ready_s=30"),
    (["timeouts.drain_s=-1"], "timeouts.drain_s=-1: must not be negative (seconds).", "timeouts.drain_s=30"),
    (["kv.commit_timeout_s=0"], "kv.commit_timeout_s=0: must be more than 0 (seconds).", "kv.commit_timeout_s=30"),
    (["name="], "name='': a name has 1 to 64 characters", "name=my-run"),
    (["name=a/b"], "name='a/b': a name has 1 to 64 characters", "name=my-run"),
    (["name=-x"], "name='-x': a name has 1 to 64 characters", "name=my-run"),
    (["rdzv.id=a b/c"], "rdzv.id='a b/c': a name has", "rdzv.id=my-run"),
    (["model.name="], "model.name is empty.", "model=Qwen/Qwen3-8B"),
    (["engine.python="], "engine.python is empty.", "engine.python=null"),
    (
        ["nnodes=2", "rdzv.endpoint=h"],
        "rdzv.endpoint='h': with nnodes=2 the port must be given",
        "rdzv.endpoint=h:29500",
    ),
    (["nnodes=2", "rdzv.endpoint=h:0"], "rdzv.endpoint='h:0': with nnodes=2 the port must be given", "h:29500"),
    (["rdzv.endpoint=tcp://h:1"], "rdzv.endpoint='tcp://h:1': must be HOST:PORT.", "10.0.0.1:29500"),
    (["rdzv.endpoint=h:99999"], "rdzv.endpoint='h:99999': must be HOST:PORT.", "10.0.0.1:29500"),
    (["node_rank=1"], "node_rank=1: must be 0 to 0 with nnodes=1.", "Leave it out"),
    (["nnodes=2", "rdzv.endpoint=h:1", "node_rank=2"], "node_rank=2: must be 0 to 1 with nnodes=2.", "node_rank=0"),
]


@pytest.mark.parametrize(("overrides", "message", "hint"), IMPOSSIBLE, ids=[" ".join(t[0]) for t in IMPOSSIBLE])
def test_impossible_values(overrides: list[str], message: str, hint: str) -> None:
    error = refused(TINY, *overrides)
    assert error.message.startswith(message)
    assert hint in (error.hint or "")


@pytest.mark.parametrize(
    "overrides",
    [
        ["nnodes=2", "rdzv.endpoint=10.0.0.1:29500", "node_rank=1"],
        ["nnodes=2", "rdzv.endpoint=[::1]:29500"],
        ["rdzv.endpoint=localhost:0"],
        ["server.port=0", "server.host=::"],
        ["timeouts.drain_s=0", "timeouts.term_s=0", "kv.cache.idle_s=0", "kv.ahead.low=0", "kv.ahead.high=0"],
    ],
)
def test_possible_values(overrides: list[str]) -> None:
    compose([TINY, *overrides])


@pytest.mark.parametrize(
    ("file", "text", "message", "hint"),
    [
        ("preset/p.yaml", "tpp: 2\n", "There is no key 'tpp'.", "Did you mean tp=2?"),
        ("preset/p.yaml", "kv:\n  reserv: 2\n", "There is no key 'kv.reserv'.", "kv.reserve=2"),
        ("preset/p.yaml", "tp: two\n", "tp wants a whole number, got 'two'.", "tp=2"),
        ("preset/p.yaml", "tp: {a: 1}\n", "tp wants a whole number, got a mapping.", ""),
        ("preset/p.yaml", "kv: 1\n", "kv has keys of its own, so '1' cannot be its value.", ""),
        ("preset/p.yaml", "- 1\n", "holds no keys.", "KEY: VALUE"),
        ("preset/p.yaml", "kv: {reserve: lots}\n", "kv.reserve wants a size in bytes, got 'lots'.", "2GiB"),
        ("preset/p.yaml", "tp: 0\n", "tp=0: must be at least 1.", "tp=1"),
        ("model/tiny-qwen3.yaml", "num_layer: 2\n", "There is no key 'model.num_layer'.", "model.num_layers"),
    ],
)
def test_own_files_are_checked(tmp_path: Path, file: str, text: str, message: str, hint: str) -> None:
    path = tmp_path / file
    path.parent.mkdir()
    path.write_text(text)
    error = refused(*([TINY, "preset=p"] if "preset" in file else [TINY]), config_dir=tmp_path)
    assert str(path) in error.message
    assert message in error.message
    assert hint in (error.hint or "")


def test_own_file_that_is_not_yaml(tmp_path: Path) -> None:
    (tmp_path / "preset").mkdir()
    (tmp_path / "preset" / "p.yaml").write_text("tp: [1\n")
    error = refused(TINY, "preset=p", config_dir=tmp_path)
    assert "not YAML" in error.message
    assert "p.yaml" in error.message


def test_own_file_that_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "preset").mkdir()
    (tmp_path / "preset" / "p.yaml").write_bytes(b"name: \xff\n")
    assert "not YAML" in refused(TINY, "preset=p", config_dir=tmp_path).message


def test_preset_that_chooses_what_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "preset").mkdir()
    (tmp_path / "preset" / "p.yaml").write_text("defaults:\n  - override /model: Nope\n")
    error = refused("preset=p", config_dir=tmp_path)
    assert "model/Nope" in error.message


def test_unknown_preset_lists_those_that_are_there(tmp_path: Path) -> None:
    (tmp_path / "preset").mkdir()
    (tmp_path / "preset" / "small.yaml").write_text("tp: 1\n")
    error = refused(TINY, "preset=smal", config_dir=tmp_path)
    assert (error.message, error.hint) == (
        "preset=smal: there is no such preset.",
        "Did you mean preset=small? Choices: small.",
    )


def test_root_of_ones_own_must_start_from_the_schema(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("tp: 2\n")
    error = refused(TINY, config_dir=tmp_path)
    assert str(tmp_path / "config.yaml") in error.message


@pytest.mark.parametrize("folder", ["missing", "file"])
def test_config_dir_must_be_a_folder(tmp_path: Path, folder: str) -> None:
    (tmp_path / "file").write_text("")
    error = refused(TINY, config_dir=tmp_path / folder)
    assert f"--config-dir {tmp_path / folder}: " in error.message


def test_interpolation_that_leads_nowhere() -> None:
    error = refused(TINY, "engine.args.a=${nothing}")
    assert error.message == "engine.args.a: Interpolation key 'nothing' not found."
    assert "\\${" in (error.hint or "")


def test_nothing_goes_below_a_plain_value() -> None:
    error = refused(TINY, "engine.args.x=1", "engine.args.x.y=2")
    assert error.message.startswith("engine.args.x.y=2: engine.args.x is already set")
