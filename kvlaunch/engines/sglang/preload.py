"""Imported by SGLang's fork server, and by nothing else: multiprocessing takes the name of a module."""

from kvlaunch.engines import forking

forking.preload(
    (
        "sglang.srt.managers.scheduler",
        "sglang.srt.managers.detokenizer_manager",
        "kvlaunch.engines.sglang.processes",
        "kvlaunch.engines.sglang.scheduler",
    )
)
