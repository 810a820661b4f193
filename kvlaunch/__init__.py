"""kvlaunch: start an LLM engine across tensor- and pipeline-parallel ranks, with an elastic KV cache."""

__version__ = "0.1.0"
