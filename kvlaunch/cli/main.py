"""The command line: verbs, their options, and how errors are shown.

Everything beyond parsing is imported by the verb that needs it: `--help` and completion stay quick.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from kvlaunch.cli import complete, words
from kvlaunch.errors import EngineError, KVLaunchError

if TYPE_CHECKING:
    from kvlaunch.config.compose import Composed
    from kvlaunch.config.schema import LaunchConfig

PROG = "kvlaunch"
INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 + SIGINT, as a shell reports it."""
BROKEN_PIPE = 141
"""Exit code when the reader of standard output has gone: 128 + SIGPIPE."""

# typer carries its own copy of click or uses the installed one, depending on its version; this is the class either way.
_UsageError: Any = typer.BadParameter.__mro__[1]


@dataclass(frozen=True, slots=True)
class _Completion:
    """What the shells' formatters read; click's own class lies elsewhere in each version of typer."""

    value: str
    help: str
    type: str = "plain"


class RootGroup(TyperGroup):
    """The verbs; a first word that is an override means `up`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, words.route(args, list(self.commands)))

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        found: list[Any] = super().shell_complete(ctx, incomplete)
        return found + [_Completion(value, text) for value, text in complete.overrides(incomplete, [], None)]


app = typer.Typer(
    name=PROG,
    cls=RootGroup,
    add_completion=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
model_app = typer.Typer(help="Models that need no download.", rich_markup_mode="rich")
app.add_typer(model_app, name="model")
secret_app = typer.Typer(help="What the nodes of a run share.", rich_markup_mode="rich")
app.add_typer(secret_app, name="secret")

# Unknown options reach the overrides: `--tp=2` works, and `--tp-size` gets a better answer than "no such option".
_OVERRIDING = {"ignore_unknown_options": True}


def _complete_overrides(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    given = ctx.params.get("config_dir")
    return complete.overrides(incomplete, list(ctx.params.get("overrides") or ()), Path(given) if given else None)


def _complete_runs(incomplete: str) -> list[str]:
    from kvlaunch.launch.paths import all_runs

    return [paths.run for paths in all_runs() if paths.run.startswith(incomplete)]


Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="What to launch: model=Qwen3-8B tp=2 pp=2 engine.args.max_model_len=4096 ... "
        "All keys: kvlaunch config model=tiny-qwen3. Groups and choices: kvlaunch config --groups.",
        autocompletion=_complete_overrides,
        show_default=False,
    ),
]
ConfigDir = Annotated[
    Path | None,
    typer.Option("--config-dir", metavar="DIR", help="Folder with groups and presets of your own; they win."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Run = Annotated[
    str | None, typer.Argument(metavar="[RUN]", help="Run or name, as ps shows it.", autocompletion=_complete_runs)
]
Cpus = Annotated[int | None, typer.Option("--cpus", metavar="N", min=1, help="CPUs of a node, if not as planned.")]
Memory = Annotated[
    str | None, typer.Option("--memory", metavar="SIZE", help="Memory of a node, as in 64GiB, if not as planned.")
]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write to a file, not to standard output.")
]

render_app = typer.Typer(help="Write what starts a run on a cluster.", rich_markup_mode="rich")
app.add_typer(render_app, name="render")


def _version(wanted: bool) -> None:
    if wanted:
        from kvlaunch import __version__

        typer.echo(f"{PROG} {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Start vLLM or SGLang across tensor- and pipeline-parallel ranks, with an elastic KV cache.

    [bold]kvlaunch engine=vllm tp=2 pp=2 model=Qwen3-8B[/bold]

    A first word that is an override (KEY=VALUE) means [bold]up[/bold].
    """


@app.command("up", context_settings=_OVERRIDING)
def up(
    overrides: Overrides = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return when the engine is ready.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show the engine's own output too.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print the ready engine as one line of JSON.")] = False,
    config_dir: ConfigDir = None,
) -> None:
    """Launch an engine and serve until Ctrl-C (the default verb)."""
    config = _compose(overrides, config_dir).config
    from kvlaunch.cli import up as verb

    raise typer.Exit(verb.run(config, detach=detach, verbose=verbose, json_output=json_output))


@app.command("plan", context_settings=_OVERRIDING)
def plan(overrides: Overrides = None, json_output: Json = False, config_dir: ConfigDir = None) -> None:
    """Show what up would start: ranks, bytes, endpoints, commands. Starts nothing."""
    from kvlaunch.cli import plan_view

    launch_plan = _plan(_compose(overrides, config_dir).config)
    plan_view.print_json(launch_plan) if json_output else plan_view.show(launch_plan)


@app.command("config", context_settings=_OVERRIDING)
def config(
    overrides: Overrides = None,
    json_output: Json = False,
    groups: Annotated[bool, typer.Option("--groups", help="List the groups and their choices.")] = False,
    config_dir: ConfigDir = None,
) -> None:
    """Print the composed config, and where each value came from."""
    from kvlaunch.cli import config_view

    if groups:
        config_view.show_groups(config_dir, json_output=json_output)
        return
    composed = _compose(overrides, config_dir)
    config_view.show(composed, json_output=json_output)


@app.command("ps")
def ps(json_output: Json = False) -> None:
    """List the runs of this machine, their ranks and their KV memory."""
    from kvlaunch.cli import ps as verb

    raise typer.Exit(verb.run(json_output=json_output))


@app.command("stop")
def stop(
    run: Run = None,
    all_runs: Annotated[bool, typer.Option("--all", help="Stop every run of yours.")] = False,
    json_output: Json = False,
) -> None:
    """Stop a run (the only one, where no RUN is given): drain, then end all its processes."""
    from kvlaunch.cli import stop as verb

    if run is not None and all_runs:
        raise _UsageError("Give a RUN or --all, not both.")
    raise typer.Exit(verb.run(run, all_runs=all_runs, json_output=json_output))


@app.command("limit")
def limit(
    size: Annotated[str, typer.Argument(metavar="SIZE", help="KV memory a rank may keep mapped: 256MiB, or none.")],
    run: Run = None,
    json_output: Json = False,
) -> None:
    """Change how much KV memory a run (the only one, where no RUN is given) may keep mapped on each rank."""
    from kvlaunch.cli import limit as verb

    raise typer.Exit(verb.run(size, run, json_output=json_output))


@app.command("logs")
def logs(
    run: Run = None,
    rank: Annotated[
        int | None, typer.Option("--rank", metavar="N", min=0, help="Log of one rank, by global rank.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as the log grows, until Ctrl-C.")] = False,
) -> None:
    """Print the log of a run (the only one, where no RUN is given)."""
    from kvlaunch.cli import logs as verb

    raise typer.Exit(verb.run(run, rank=rank, follow=follow))


@render_app.command("slurm", context_settings=_OVERRIDING)
def render_slurm(
    overrides: Overrides = None,
    *,
    time: Annotated[str | None, typer.Option("--time", metavar="LIMIT", help="As sbatch takes it: 8:00:00.")] = None,
    partition: Annotated[str | None, typer.Option("--partition", metavar="NAME", help="As for sbatch.")] = None,
    account: Annotated[str | None, typer.Option("--account", metavar="NAME", help="As for sbatch.")] = None,
    sbatch: Annotated[
        list[str] | None,
        typer.Option("--sbatch", metavar="OPTION", help="Another of its options: --sbatch=--qos=high."),
    ] = None,
    before: Annotated[
        list[str] | None, typer.Option("--before", metavar="LINE", help="Shell to run first: 'module load cuda'.")
    ] = None,
    cpus: Cpus = None,
    memory: Memory = None,
    output: Output = None,
    config_dir: ConfigDir = None,
) -> None:
    """Write an sbatch script that runs the plan, one agent a node."""
    from kvlaunch.cli import render as verb
    from kvlaunch.render.slurm import SlurmOptions

    options = SlurmOptions(
        time=time, partition=partition, account=account, more=tuple(sbatch or ()), before=tuple(before or ())
    )
    common = verb.Common(cpus=cpus, memory=memory, config_dir=config_dir, output=output)
    raise typer.Exit(verb.slurm(list(overrides or ()), options, common))


@render_app.command("kubernetes", context_settings=_OVERRIDING)
def render_kubernetes(
    overrides: Overrides = None,
    *,
    image: Annotated[
        str | None, typer.Option("--image", metavar="NAME", help="Container image with kvlaunch and the engine.")
    ] = None,
    namespace: Annotated[str | None, typer.Option("--namespace", metavar="NAME", help="Where it goes.")] = None,
    replicas: Annotated[int, typer.Option("--replicas", metavar="N", help="Engines, each on all nodes.")] = 1,
    secret: Annotated[
        str | None, typer.Option("--secret", metavar="NAME", help="The Secret that holds the run's secret.")
    ] = None,
    with_secret: Annotated[
        bool, typer.Option("--with-secret", help="Make a secret, and write it into the manifests.")
    ] = False,
    cpus: Cpus = None,
    memory: Memory = None,
    output: Output = None,
    config_dir: ConfigDir = None,
) -> None:
    """Write a LeaderWorkerSet that runs the plan, and a Service in front of it."""
    from kvlaunch.cli import render as verb
    from kvlaunch.render.kubernetes import KubernetesOptions

    options = KubernetesOptions(image=image or "", namespace=namespace, replicas=replicas, secret=secret)
    common = verb.Common(cpus=cpus, memory=memory, config_dir=config_dir, output=output)
    raise typer.Exit(verb.kubernetes(list(overrides or ()), options, common, with_secret=with_secret))


@model_app.command("make-tiny")
def make_tiny(directory: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to make it in.")]) -> None:
    """Make the tiny test model: Qwen3 architecture, fixed-seed random weights, a few MB."""
    from kvlaunch.plan import tiny

    tiny.make_tiny(directory)
    typer.echo(f"made {directory}; serve it with: {PROG} model={words.quoted(_as_local(directory))}")


@secret_app.command("new")
def secret_new() -> None:
    """Print a new secret: every node of a run gets the same, as KVLAUNCH_SECRET or in the file rdzv.secret_file."""
    from kvlaunch.secret import new_secret

    typer.echo(new_secret().text)


def _as_local(directory: Path) -> str:
    text = str(directory)
    return text if directory.is_absolute() or text.startswith((".", "~")) else f"./{text}"


def _compose(overrides: Sequence[str] | None, config_dir: Path | None) -> Composed:
    from kvlaunch.config.compose import compose

    given = list(overrides or ())
    words.check(given, [command.name or "" for command in app.registered_commands])
    composed = compose(given, config_dir=config_dir)
    told = _told_by_cluster(composed)
    return compose([*given, *told], config_dir=config_dir) if told else composed


def _told_by_cluster(composed: Composed) -> list[str]:
    """Overrides for what the user has left to the cluster that this process runs in."""
    from kvlaunch.config.origins import DEFAULT
    from kvlaunch.launch.cluster_env import recognise

    found = recognise(os.environ)
    if found is None:
        return []
    given = {key: composed.value(key) for key in found.settings if composed.origin(key) != DEFAULT}
    told = [f"{key}={value}" for key, value in found.defaults(given).items()]
    if told:
        typer.echo(found.line, err=True)
    return told


def _plan(config: LaunchConfig) -> Any:
    from kvlaunch.plan.host import probe_host
    from kvlaunch.plan.ids import meeting_point, new_run_id
    from kvlaunch.plan.planner import make_plan

    return make_plan(config, run=new_run_id(config), host=probe_host(endpoint=meeting_point(config)))


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit with its code.

    Args:
        argv: words after the program's name; None: those that the process was started with.
    """
    complete.join_split_words()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A name that the terminal's encoding does not have is shown escaped; it is no reason to fail.
            stream.reconfigure(errors="backslashreplace")
    code = guarded(lambda: _run(list(sys.argv[1:] if argv is None else argv)))
    sys.exit(code)


def _run(argv: list[str]) -> int:
    from typer.main import get_command

    code = get_command(app).main(argv or ["--help"], prog_name=PROG, standalone_mode=False)
    sys.stdout.flush()
    return code if isinstance(code, int) else 0


def guarded(action: Callable[[], int]) -> int:
    """Run an action; errors meant for the user become a message on standard error and an exit code.

    With KVLAUNCH_DEBUG=1 in the environment they are raised, with their traceback.
    """
    if os.environ.get("KVLAUNCH_DEBUG") == "1":
        return action()
    try:
        return action()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _discard_output()
        return BROKEN_PIPE
    except (KVLaunchError, OSError, _UsageError) as e:
        return _report(e)


def _report(error: Any) -> int:
    """Say what went wrong; the exit code."""
    if isinstance(error, OSError):
        where = f": {error.filename}" if error.filename is not None else ""
        words.complain(f"{error.strerror or error}{where}", "KVLAUNCH_DEBUG=1 shows where it happened.")
        return 1
    if not isinstance(error, KVLaunchError):
        words.complain(error.format_message(), f"See {error.ctx.command_path if error.ctx else PROG} --help.")
        return 2
    words.complain(error.message, error.hint)
    if isinstance(error, EngineError) and error.log_tail.strip():
        sys.stderr.write("".join(f"  | {line}\n" for line in error.log_tail.rstrip().splitlines()))
        if error.log_path and error.log_path not in str(error):
            sys.stderr.write(f"  The whole log: {error.log_path}\n")
    return int(error.exit_code)


def _discard_output() -> None:
    """Let the interpreter's last flush go nowhere: the reader has gone."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


if __name__ == "__main__":
    main()
