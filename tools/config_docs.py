"""Write the table of all config keys into docs/configuration.md, from the schema.

    python tools/config_docs.py            rewrite the part between the markers
    python tools/config_docs.py --check    exit with 1 where it is not what the schema says

Needs kvlaunch's environment: the keys, their types and what they mean come from kvlaunch.config.keys.
"""

from __future__ import annotations

import sys
from pathlib import Path

from doc_part import renew, replaced

from kvlaunch.config.keys import Key, all_keys, doc_of

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
BEGIN = "<!-- keys: written by `make docs` from kvlaunch/config/schema.py -->"
END = "<!-- end of keys -->"

MEANING = {
    "engine.name": "Set by the choice of the group.",
    "model.architecture": "Class name in the model's config.json, `Qwen3ForCausalLM`.",
    "model.num_layers": "Transformer layers of the whole model.",
    "model.hidden_size": "Width of the residual stream.",
    "model.intermediate_size": "Width of the MLP of a dense layer.",
    "model.num_heads": "Query heads.",
    "model.num_kv_heads": "Key and value heads; replicated where `tp` is larger.",
    "model.head_dim": "Elements of one head.",
    "model.vocab_size": "Rows of the embedding table.",
    "model.tie_word_embeddings": "The output head shares the embedding table.",
    "model.moe_intermediate_size": "Width of one expert's MLP.",
    "model.dtype": "Data type that weights and KV cache are held in.",
    "kv.mode": "Set by the choice of the group.",
    "device.name": "Set by the choice of the group.",
    "cluster.name": "Set by the choice of the group.",
    "nnodes": "Number of hosts.",
    "node_rank": "Which of them this is, from 0; null: the rendezvous decides. Node 0 serves HTTP.",
    "server.host": "Address to listen on; `0.0.0.0` for every interface.",
    "rdzv.backend": "Rendezvous backend of torch.distributed.elastic.",
    "rdzv.timeout_s": "Seconds that the nodes wait for each other.",
}
"""What the schema leaves to the name of a field."""

TYPES = {
    "int": "integer",
    "float": "number",
    "bool": "true, false",
    "str": "text",
    "bytes": "size",
    "args": "mapping",
    "env": "mapping",
}


def shown_type(key: Key) -> str:
    kind = ", ".join(f"`{choice}`" for choice in key.choices) if key.kind == "enum" else TYPES[key.kind]
    return f"{kind}; null" if key.optional else kind


def shown_default(key: Key) -> str:
    if key.default == "???":
        return "from the group"
    if key.kind in ("args", "env"):
        return "empty"
    if key.default is None:
        return "null"
    return f"`{str(key.default).lower() if isinstance(key.default, bool) else key.default}`"


def meaning(key: Key) -> str:
    """Raises SystemExit where nobody has said what the key means."""
    text = doc_of(key) or MEANING.get(key.path, "")
    if not text:
        sys.exit(f"{key.path}: give the field a docstring in kvlaunch/config/schema.py, or a line in {__file__}")
    return text.replace("|", "\\|")


def table() -> str:
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for key in all_keys().values():
        if key.kind != "node":
            rows.append(f"| `{key.path}` | {shown_type(key)} | {shown_default(key)} | {meaning(key)} |")
    return "\n".join(rows)


def rendered(page: str) -> str:
    """The page with the table of today between its markers."""
    return replaced(page, BEGIN, END, table())


def main() -> int:
    return renew(PAGE, rendered, check=sys.argv[1:] == ["--check"], source="kvlaunch/config/schema.py")


if __name__ == "__main__":
    sys.exit(main())
