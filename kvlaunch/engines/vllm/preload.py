"""Imported by vLLM's fork server, and by nothing else: multiprocessing takes the name of a module."""

from kvlaunch.engines import forking

forking.preload(
    (
        "vllm.v1.engine.core",
        "vllm.v1.executor.multiproc_executor",
        "vllm.v1.worker.cpu_worker",
        "kvlaunch.engines.vllm.processes",
        "kvlaunch.engines.vllm.scheduler",
        "kvlaunch.engines.vllm.block_pool",
        "kvlaunch.engines.vllm.worker",
    )
)
