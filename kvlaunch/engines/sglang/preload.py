"""Imported by SGLang's fork server, and by nothing else: multiprocessing takes the name of a module."""

from kvlaunch.engines import forking

forking.preload(
    (
        "sglang.srt.managers.scheduler",
        "sglang.srt.managers.detokenizer_manager",
        "sglang.srt.mem_cache.kv_cache_configurator",
        "sglang.srt.model_executor.model_runner",
        "sglang.srt.models.registry",
        "kvlaunch.engines.sglang.processes",
        "kvlaunch.engines.sglang.scheduler",
    )
)
