"""Imported by the fork server, and by nothing else: multiprocessing takes the name of a module."""

from kvlaunch.engines.vllm.forking import preload

preload()
