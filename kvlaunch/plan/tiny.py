"""The tiny model: a Qwen3 architecture with fixed-seed random weights and a byte-level tokenizer, made locally.

`python -m kvlaunch.plan.tiny DIR` writes it, with the interpreter of an engine's environment (it needs torch,
safetensors and tokenizers). Importing this module needs none of them.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlaunch.errors import ConfigError, KVLaunchError

if TYPE_CHECKING:
    import torch

VERSION = 2
"""Version of the recipe: another one makes other bytes, and lives in another folder."""

NUM_LAYERS = 4
HIDDEN = 128
INTERMEDIATE = 256
NUM_HEADS = 4
NUM_KV_HEADS = 2
HEAD_DIM = 32
VOCAB = 512
MAX_CONTEXT = 4096

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Token ids 256, 257, 258: the 256 bytes come first."""

_SEED = 20240229
_MARKER = "kvlaunch-tiny.json"

_CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


def tiny_model_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Where the tiny model is kept: `$XDG_CACHE_HOME/kvlaunch/models/tiny-qwen3-<version>`."""
    env = os.environ if environ is None else environ
    cache = env.get("XDG_CACHE_HOME")
    base = Path(cache) if cache and Path(cache).is_absolute() else Path.home() / ".cache"
    return base / "kvlaunch" / "models" / f"tiny-qwen3-{VERSION}"


def is_tiny(directory: Path) -> bool:
    """True where the folder holds this version of the tiny model, complete."""
    try:
        marker = json.loads((directory / _MARKER).read_text())
    except (OSError, ValueError):
        return False
    return bool(marker == {"version": VERSION})


def make_tiny(directory: Path) -> None:
    """Write the tiny model to `directory`; nothing is done where it is there already. The same bytes every time.

    The folder appears whole or not at all: another process may make it at the same time.

    Raises:
        ConfigError: `directory` exists, is not empty and holds something else.
        KVLaunchError: torch, safetensors or tokenizers is missing from this interpreter's environment.
    """
    directory = directory.absolute()
    if is_tiny(directory):
        return
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(
            f"{directory} is not empty and holds no tiny model of this version.",
            hint="Name a folder that does not exist yet, or empty this one.",
        )
    directory.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        work.chmod(0o755)
        _write(work)
        try:
            # Replaces an empty folder; fails on one that another process has filled meanwhile.
            work.rename(directory)
        except OSError:
            if not is_tiny(directory):
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _write(directory: Path) -> None:
    try:
        _write_weights(directory / "model.safetensors")
        _write_tokenizer(directory)
    except ImportError as error:
        raise KVLaunchError(
            f"The tiny model needs {error.name}, which {sys.executable} does not have.",
            hint="Make it with the engine's interpreter: engine.python=...",
        ) from error
    _write_json(directory / "config.json", _config())
    _write_json(
        directory / "generation_config.json",
        {"bos_token_id": 256, "eos_token_id": [258, 256], "pad_token_id": 256, "do_sample": False},
    )
    _write_json(directory / _MARKER, {"version": VERSION})


def _config() -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 256,
        "eos_token_id": 258,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": INTERMEDIATE,
        "max_position_embeddings": MAX_CONTEXT,
        "max_window_layers": NUM_LAYERS,
        "num_attention_heads": NUM_HEADS,
        "num_hidden_layers": NUM_LAYERS,
        "num_key_value_heads": NUM_KV_HEADS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": VOCAB,
    }


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_weights(path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator(device="cpu").manual_seed(_SEED)

    def normal(*shape: int, std: float) -> torch.Tensor:
        # torch documents the CPU generator's stream as stable for one seed; sampling in float32 keeps it so.
        return (torch.randn(*shape, generator=generator, dtype=torch.float32) * std).to(torch.bfloat16)

    def ones(size: int, value: float = 1.0) -> torch.Tensor:
        return torch.full((size,), value, dtype=torch.bfloat16)

    # The output head is the embeddings: only printable ASCII wins there, so that outputs are text, never end early and
    # differ visibly. As inputs all rows count alike, for the first norm scales them.
    embeddings = normal(VOCAB, HIDDEN, std=0.5)
    embeddings[:0x20] *= 0.0625
    embeddings[0x7F:] *= 0.0625
    # Gains well above a trained model's start: attention and MLP must outweigh the residual of the last token, or that
    # token would be repeated for ever; and sharp attention, so that one wrong block of the KV cache changes the output.
    tensors = {"model.embed_tokens.weight": embeddings, "model.norm.weight": ones(HIDDEN)}
    for layer in range(NUM_LAYERS):
        prefix = f"model.layers.{layer}."
        q, kv = NUM_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM
        tensors |= {
            f"{prefix}input_layernorm.weight": ones(HIDDEN),
            f"{prefix}post_attention_layernorm.weight": ones(HIDDEN),
            f"{prefix}self_attn.q_proj.weight": normal(q, HIDDEN, std=HIDDEN**-0.5),
            f"{prefix}self_attn.k_proj.weight": normal(kv, HIDDEN, std=HIDDEN**-0.5),
            f"{prefix}self_attn.v_proj.weight": normal(kv, HIDDEN, std=2 * HIDDEN**-0.5),
            f"{prefix}self_attn.o_proj.weight": normal(HIDDEN, q, std=2 * q**-0.5),
            f"{prefix}self_attn.q_norm.weight": ones(HEAD_DIM, 3.0),
            f"{prefix}self_attn.k_norm.weight": ones(HEAD_DIM),
            f"{prefix}mlp.gate_proj.weight": normal(INTERMEDIATE, HIDDEN, std=2 * HIDDEN**-0.5),
            f"{prefix}mlp.up_proj.weight": normal(INTERMEDIATE, HIDDEN, std=2 * HIDDEN**-0.5),
            f"{prefix}mlp.down_proj.weight": normal(HIDDEN, INTERMEDIATE, std=2 * INTERMEDIATE**-0.5),
        }
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)


def _write_tokenizer(directory: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    # No merges: every byte is a token of its own, whatever the text.
    vocab = {character: index for index, character in enumerate(_byte_alphabet())}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS])
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": MAX_CONTEXT,
            "clean_up_tokenization_spaces": False,
            "bos_token": SPECIAL_TOKENS[0],
            "eos_token": SPECIAL_TOKENS[2],
            "pad_token": SPECIAL_TOKENS[0],
            "additional_special_tokens": list(SPECIAL_TOKENS),
            "chat_template": _CHAT_TEMPLATE,
        },
    )


def _byte_alphabet() -> list[str]:
    """The character that stands for each byte in byte-level tokenizers (GPT-2's table): printable Latin-1 bytes for
    themselves, the rest for the code points from 256 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _main(argv: list[str]) -> int:
    if len(argv) != 1:
        print("usage: python -m kvlaunch.plan.tiny DIR", file=sys.stderr)
        return ConfigError.exit_code
    try:
        make_tiny(Path(argv[0]))
    except KVLaunchError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
