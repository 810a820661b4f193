from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvlaunch.errors import ConfigError
from kvlaunch.plan import tiny

pytest.importorskip("torch")
pytest.importorskip("safetensors")
pytest.importorskip("tokenizers")

TEXTS = ["", "hello", " leading and  double ", "héllo 模型 🎉\n\t\x00\x7f", "<|im_start|>x<|im_end|>", "\u202e é"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("a b'c") / "tiny"
    tiny.make_tiny(folder)
    return folder


def digest(folder: Path) -> str:
    files = sorted(path for path in folder.iterdir())
    return hashlib.sha256(b"".join(path.name.encode() + path.read_bytes() for path in files)).hexdigest()


def test_the_same_bytes_every_time(model: Path, tmp_path: Path) -> None:
    again = tmp_path / "nested" / "tiny"
    command = [sys.executable, "-m", "kvlaunch.plan.tiny", str(again)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert digest(again) == digest(model)
    assert [path.name for path in again.parent.iterdir()] == ["tiny"]
    assert sum(path.stat().st_size for path in again.iterdir()) < 5 * 2**20


def test_a_model_that_is_there_is_left_alone(model: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in model.iterdir()}
    tiny.make_tiny(model)
    assert {path.name: path.stat().st_mtime_ns for path in model.iterdir()} == before


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    tiny.make_tiny(tmp_path)
    assert tiny.is_tiny(tmp_path)


@pytest.mark.parametrize("name", ["notes.txt", "kvlaunch-tiny.json"])
def test_another_folder_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(ConfigError, match="holds no tiny model"):
        tiny.make_tiny(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert tiny._main([str(tmp_path)]) == ConfigError.exit_code


def test_a_failure_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> None:
        path.write_text("half")
        raise OSError("no space")

    monkeypatch.setattr(tiny, "_write_weights", fail)
    with pytest.raises(OSError, match="no space"):
        tiny.make_tiny(tmp_path / "tiny")
    assert list(tmp_path.iterdir()) == []


def test_the_folder_follows_the_cache_variable() -> None:
    assert tiny.tiny_model_dir({"XDG_CACHE_HOME": "/c"}) == Path(f"/c/kvlaunch/models/tiny-qwen3-{tiny.VERSION}")
    assert tiny.tiny_model_dir({"XDG_CACHE_HOME": "relative"}).is_relative_to(Path.home())


def test_the_tokenizer_is_a_byte_each(model: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    assert tokenizer.encode("aé").ids == list("aé".encode())
    assert [tokenizer.token_to_id(text) for text in tiny.SPECIAL_TOKENS] == [256, 257, 258]
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_config_json_says_what_the_weights_are(model: Path) -> None:
    from safetensors import safe_open

    config = json.loads((model / "config.json").read_text())
    with safe_open(model / "model.safetensors", framework="pt") as weights:
        shapes = {name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()}  # noqa: SIM118
    assert shapes["model.embed_tokens.weight"] == (config["vocab_size"], config["hidden_size"])
    assert shapes["model.layers.3.self_attn.k_proj.weight"] == (
        config["num_key_value_heads"] * config["head_dim"],
        config["hidden_size"],
    )
    assert "lm_head.weight" not in shapes


@pytest.mark.slow
def test_transformers_generates_text_that_depends_on_the_prompt(model: Path) -> None:
    code = f"""
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
folder = {os.fspath(model)!r}
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
for text in {TEXTS!r}:
    assert tokenizer.decode(tokenizer(text)["input_ids"], clean_up_tokenization_spaces=False) == text, text
chat = tokenizer.apply_chat_template(
    [{{"role": "user", "content": "hi"}}], tokenize=False, add_generation_prompt=True)
assert chat == "<|im_start|>user\\nhi<|im_end|>\\n<|im_start|>assistant\\n", chat
filler = " and so on" * 20
outputs = []
for prompt in ("Hello", "The capital of France is", "A" + filler, "B" + filler):
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False)
    outputs.append(out[0, ids.shape[1]:].tolist())
assert len(set(map(tuple, outputs))) == 4, outputs
assert all(len(out) == 40 and len(set(out)) > 5 for out in outputs), outputs
assert all(0x20 <= token < 0x7F for out in outputs for token in out), outputs
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
