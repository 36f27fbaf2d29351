"""The `dsde` command: reads its options, hands the work to the layer that does it, turns errors into one clear line.

Nothing heavy is imported before a command needs it, so `dsde --help` answers at once.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from dsde.config import DsdeConfig

__all__ = ["main"]

_SETS = ("embedded", "bench", "all")


class _Option(NamedTuple):
    setting: str
    metavar: str
    help: str


# Values go to the configuration as text: it checks them and names the setting, so argparse need not.
_OPTIONS = {
    "--pair": _Option("model.pair", "NAME", "prepared pair: embedded, bench or bench-low"),
    "--target": _Option("model.target", "MODEL", "target model, Hugging Face name or path; needs --draft"),
    "--draft": _Option("model.draft", "MODEL", "draft model with the target's vocabulary; needs --target"),
    "--served-name": _Option("model.served_name", "NAME", "model name in the API"),
    "--dtype": _Option("model.dtype", "TYPE", "auto, bfloat16, float16 or float32"),
    "--max-model-len": _Option("model.max_model_len", "TOKENS", "longest prompt plus answer"),
    "--policy": _Option("speculation.policy", "NAME", "policy that sets each request's speculation length"),
    "--max-length": _Option("speculation.max_length", "TOKENS", "longest speculation length"),
    "--max-num-seqs": _Option("engine.max_num_seqs", "N", "requests that decode together in one engine"),
    "--kv-cache-gib": _Option("engine.kv_cache_gib", "GIB", "KV cache of a CPU engine"),
    "--device": _Option("serving.device", "DEVICE", "cpu or gpu"),
}
_SERVING_OPTIONS = {
    "--replicas": _Option("serving.replicas", "N", "engine replicas"),
    "--cpus-per-replica": _Option("serving.cpus_per_replica", "CORES", "CPU cores of one replica"),
    "--gpus-per-replica": _Option("serving.gpus_per_replica", "GPUS", "GPUs of one replica"),
    "--host": _Option("serving.host", "ADDRESS", "address to listen on"),
    "--port": _Option("serving.port", "PORT", "HTTP port"),
    "--dashboard-port": _Option("serving.dashboard_port", "PORT", "port of the Ray dashboard, on loopback"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code: 0 done, 1 the work failed, 2 the options or the configuration are not usable."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.command(options))
    except (ValueError, OSError, RuntimeError) as error:
        if not _ours(error):
            raise
        for line in str(error).splitlines():
            print(f"dsde: {line}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _ours(error: BaseException) -> bool:
    """Whether dsde raised it, and so wrote its text for the user; a defect elsewhere keeps its traceback."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    raised_in = str(trace.tb_frame.f_globals.get("__name__", "")) if trace is not None else ""
    return raised_in.split(".")[0] in ("dsde", "deployments")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dsde", description="Serve language models with speculative decoding whose length follows each request."
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    serve = commands.add_parser(
        "serve",
        help="serve a pair over HTTP, in the foreground",
        description="Serve a pair over HTTP until Ctrl-C.",
        epilog="example: dsde serve --pair embedded --policy static --set speculation.settings.length=3",
    )
    _add_settings(serve, _OPTIONS | _SERVING_OPTIONS)
    serve.set_defaults(command=_serve)

    engine_args = commands.add_parser(
        "engine-args",
        help="print a pair's vLLM engine arguments",
        description="Print the vLLM engine arguments of a pair as one JSON object, ready for vllm.LLM(**arguments).",
        epilog="example: dsde engine-args --pair bench --policy static",
    )
    _add_settings(engine_args, _OPTIONS)
    engine_args.add_argument("--cli", action="store_true", help="print the `vllm serve` command instead")
    engine_args.set_defaults(command=_engine_args)

    models = commands.add_parser("models", help="prepare and list the models dsde brings along")
    actions = models.add_subparsers(title="commands", metavar="COMMAND", required=True)
    prepare = actions.add_parser(
        "prepare",
        help="make the models of a set, once",
        description="Make the models of a set from SmolLM2-135M-Instruct; what is there already is kept.",
    )
    prepare.add_argument("set", choices=_SETS, help="embedded (1.1 GiB on disk), bench (2.5 GiB) or all")
    prepare.add_argument("--verify", action="store_true", help="compare SHA-256 sums, not sizes only")
    prepare.set_defaults(command=_prepare)
    listing = actions.add_parser("list", help="list the pairs and whether they are prepared")
    listing.set_defaults(command=_list)
    return parser


def _add_settings(parser: argparse.ArgumentParser, options: dict[str, _Option]) -> None:
    group = parser.add_argument_group("settings", "each wins over the environment (DSDE_SECTION__SETTING) and the file")
    group.add_argument("--config", type=Path, metavar="FILE", help="YAML file with the settings")
    for flag, option in options.items():
        group.add_argument(flag, dest=option.setting, metavar=option.metavar, help=f"{option.help} [{option.setting}]")
    group.add_argument(
        "--set", action="append", default=[], dest="extra", metavar="SETTING=VALUE", help="any setting, value in YAML"
    )


def _configuration(options: argparse.Namespace) -> DsdeConfig:
    from dsde.config import load

    overrides: dict[str, Any] = {}
    for path, value in vars(options).items():
        if "." in path and value is not None:
            _put(overrides, path, value)
    for assignment in options.extra:
        import yaml

        path, equals, value = assignment.partition("=")
        if not equals or "." not in path:
            raise ValueError(f"--set {assignment}: accepted: SECTION.SETTING=VALUE, as in speculation.max_length=4")
        try:
            _put(overrides, path, yaml.safe_load(value))
        except yaml.YAMLError as error:
            raise ValueError(f"--set {assignment}: the value is not YAML") from error
    return load(options.config, overrides)


def _put(tree: dict[str, Any], path: str, value: Any) -> None:
    *sections, name = path.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            raise ValueError(f"--set {path}: {section} is given as a value already")
    tree[name] = value


def _serve(options: argparse.Namespace) -> int:
    config = _configuration(options)
    from dsde.engine.plugin import model_paths
    from dsde.models.check import check_memory, check_models

    paths = model_paths(config)
    check_models(*paths)
    check_memory(config, *paths)
    from deployments.serve import run

    return int(run(config) or 0)


def _engine_args(options: argparse.Namespace) -> int:
    config = _configuration(options)
    # vLLM logs to stdout, where a caller expects one JSON object.
    with contextlib.redirect_stdout(sys.stderr):
        from dsde.engine.plugin import engine_arguments, model_paths, serve_command
        from dsde.models.check import check_models

        check_models(*model_paths(config))
        text = serve_command(config) if options.cli else json.dumps(engine_arguments(config))
    print(text)
    return 0


def _prepare(options: argparse.Namespace) -> int:
    from dsde.models.prepare import prepare

    root = prepare(options.set, lambda text: print(text, flush=True), verify=options.verify)
    print(f"models {options.set}: ready in {root}")
    return 0


def _list(options: argparse.Namespace) -> int:
    from dsde.models.pairs import PAIRS, pair

    for name, members in PAIRS.items():
        try:
            ready = pair(name)
            print(f"{name:10} ready         {members.description}")
            print(f"{'':25}target {ready.target}\n{'':25}draft  {ready.draft}")
        except FileNotFoundError:
            print(f"{name:10} not prepared  {members.description}; run `dsde models prepare {members.prepared_by}`")
    return 0


if __name__ == "__main__":
    sys.exit(main())
