"""The `dsde` command: reads its options, hands the work to the layer that does it, turns errors into one clear line.

Nothing heavy is imported before a command needs it, so `dsde --help` answers at once.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
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
    "--grpc-port": _Option("serving.grpc_port", "PORT", "gRPC port"),
    "--dashboard-port": _Option("serving.dashboard_port", "PORT", "port of the Ray dashboard, on loopback"),
    "--keys": _Option("access.keys_file", "FILE", "API keys, made by `dsde keys`"),
}


_BENCH = """\
Measure speculation policies against each other on real engines, all in this process.

Contenders take turns on the same prompts, round by round, and each ratio is taken within a round, so that it holds on a
machine whose speed changes. The clock runs while a full batch decodes; reading the prompts is not measured.

Contenders:
  autoregressive         an engine without a drafter: the baseline, always there
  static                 fixed lengths 1, 2, 3, 4, 6, 8 and 10; the best of each cell, in hindsight, is static-opt
  static-K               one fixed length; static-0 is an engine with a drafter that rests
  NAME                   a policy of the controller: paper, reference, ...
  NAME:SETTING=VALUE     the same with its own settings, as in paper:min_length=1:warmup_length=3
"""
_BENCH_EXAMPLES = """\
examples:
  dsde bench --quick --json bench.json --plot pictures
  dsde bench --batch 1,8 --temperature 0 --workload code,chat --policies static,paper --minutes 20
  dsde bench --batch 8 --draft high --policies autoregressive --rounds 6 --record high.jsonl.gz
  dsde bench --load 1,4,16,32,4,1 --temperature 0 --workload mix

--json writes {"cells": [{"batch", "temperature", "draft", "workload", "policy", ...}], "machine": {...}}; a moving
load has the batch "1-4-16-32-4-1", and its static-opt is the best single length for the whole run.
"""


_SIMULATE = """\
Compare request routers on modelled replicas, in seconds and without an engine.

Every policy gets the same arrivals. stability_aware is the scoring code that serves; two_random_choices is what Ray
Serve does by itself. Acceptance comes from recorded traces, step times from learnt costs.
"""
_SIMULATE_EXAMPLES = """\
examples:
  dsde simulate
  dsde simulate --mix shared_prefix --replicas 16 --load 0.8 --runs 5 --json routing.json
  dsde simulate --trace high.jsonl.gz --trace low.jsonl.gz --policies stability_aware,shortest_queue

mixes: mixed, uniform, long_outputs, long_prompts, shared_prefix, stragglers, slow_replica (one replica at half speed)
--json writes {"policies": {NAME: {"p50_ms", "p99_ms", "tokens_per_s", "straggler_share", ...}}, "simulated": {...}}
"""


_REPLAY = """\
Replay policies on recorded traces with any step costs, without an engine, and report how far each stays behind oracles.

A trace holds drafts of a real pair and what became of them: record one with `dsde bench --record`. Policies run through
the real controller. A cost model says what a step takes, in ms: BASE + TOKEN x (tokens verified), and for each draft
step DRAFT + DRAFT_PER_REQUEST x (requests). Every policy of a cell decodes equally many tokens.

Policies: as in `dsde bench --help`; batch_schedule without a table is profiled on the trace (on the tuning half with
--held-out).
"""
_REPLAY_EXAMPLES = """\
examples:
  dsde replay high.jsonl.gz,low.jsonl.gz --cost "cpu;gpu-mixed" --json replay.json --plot pictures
  dsde replay high.jsonl.gz --policies static,goodput,paper:min_length=1 --batch 1,8 --cost 40,0.05,4 --held-out
  dsde replay high.jsonl.gz --load 1,4,16,32,4,1 --policies static,goodput,batch_schedule --temperature 0
  dsde replay high.jsonl.gz --signals

--json writes {"cells": [{"trace", "cost", "batch", "temperature", "workload", "policy", ...}], "signals": [...],
"replay": {...}}.
"""
_LOADTEST = """\
Send traffic to a running server over HTTP and gRPC, and report what came back, with the server's own figures.

It is an open loop: a request leaves when it is due, however many are still without an answer. The exit code is 1 when
a request failed or an answer came without its figures.

Profiles, over the whole --duration, arrivals by chance (Poisson):
  steady       --rate requests a second
  ramp         from --rate to --peak and back
  burst        --rate, and three times --peak for a twentieth of the time
  diurnal      one day's course between --rate and --peak
  trace        the times of --input, if it has any (then the default)

what --against takes, one replica, engine arguments as ours:
  vllm         `vllm serve` without speculation
  vllm:K       `vllm serve` with K draft tokens a step
  vllm:dsde    `vllm serve` with our plugin: what Ray Serve costs
"""
_LOADTEST_EXAMPLES = """\
examples:
  dsde loadtest --quick --report load
  dsde loadtest --protocol mixed --profile ramp --rate 0.5 --peak 4 --duration 300 --report load
  dsde loadtest --mix chat=3,code=1 --rate 2 --policy static --report static
  dsde loadtest --compare load static
  dsde loadtest --input trace.csv --duration 600
  dsde loadtest --find-rate --slo-ttft 500
  dsde loadtest --against vllm --rate 1 --duration 30 --rounds 3
  dsde loadtest --aiperf there --rate 2

--input takes our own lines, Spec-Bench's question.jsonl, ShareGPT's JSON, and traces (BurstGPT, Azure, Mooncake).
--report writes report.html, which needs no network, records.jsonl (a request a line) and summary.json.
"""


_CLIENT = """\
Ask a running server one question and watch the answer come, with the figures of its speculation below it.

The question goes as a chat to http://127.0.0.1:8000 or, with --grpc, to 127.0.0.1:9000. Ctrl-C cancels it. Where stdout
is no terminal, the figures go to stderr.
"""
_CLIENT_EXAMPLES = """\
examples:
  dsde client "Name three rivers."
  dsde client --grpc "Name three rivers." --max-tokens 40 --temperature 0
  dsde client "Name three rivers." --system "You are brief." --policy static
  dsde client "Name three rivers." --json | jq .speculation.dsde
"""


_CHAOS = """\
Hurt an application that `dsde serve` runs on this machine, fault after fault, and report what was done.

The seed decides which fault comes and whom it hits. A fault that would leave fewer engines than --keep waits until it
does not, and is left out where the time ends first.

Faults:
  engine    kill an engine's process
  replica   kill a replica, and its engine with it
  stall     stop an engine's process, so that it lives and makes no step; engine.step_timeout_s ends it
  ingress   kill the ingress, and the calls that it holds with it
"""
_CHAOS_EXAMPLES = """\
examples:
  dsde chaos --every 30 --minutes 20 --seed 1 --json chaos.json
  dsde chaos --faults engine,stall --minutes 2
  dsde chaos --serve --traffic 6 --seed 1     # what `make chaos SEED=1` does

With --traffic every stream is compared with the same one before the first fault, and the last line is the verdict,
{"requests", "lost", "duplicated", "wrong", "errors_explicit", "resumed", "faults"}. Lost are those that broke off
without an error; the exit status is 1 where one was lost, duplicated or wrong.

--json writes {"seed", "every_s", "faults": [{"at_s", "kind", "pid", "left", "recovered_s"}, ...], "memory_mib"}. A
fault with the pid null was left out; recovered_s is the time until as many engine processes ran as at the start;
memory_mib is that of the processes that outlived all faults, [before the first, at the end], and growth by a fifth and
200 MiB fails.
"""


_KEYS = """\
Make, list and revoke API keys. A server that was started with --keys FILE follows the file: a change holds within a
second, without a restart. The file has hashes, so a key is shown once, when it is made. To rotate one, add another of
the same name, hand it out, then revoke the old.
"""
_KEYS_EXAMPLES = """\
examples:
  dsde keys add alice --file keys.json
  dsde keys add batch --file keys.json --tokens-per-minute 60000 --concurrency 16 --expires 2027-06-30
  dsde serve --keys keys.json
  curl -H "Authorization: Bearer $KEY" http://127.0.0.1:8000/v1/models
  DSDE_API_KEY=$KEY dsde client "Name three rivers."
  dsde keys list --file keys.json
  dsde keys revoke 3f09c2d71ab4 --file keys.json
"""


_TOP_EXAMPLES = """\
examples:
  dsde top
  dsde top --url http://127.0.0.1:8080/metrics --once
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code: 0 done, 1 the work failed, 2 the options or the configuration are not usable."""
    options = _parser().parse_args(arguments)
    options.arguments = list(sys.argv[1:] if arguments is None else arguments)
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
    return raised_in.split(".")[0] in ("dsde", "deployments", "loadtest")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dsde", description="Serve language models with speculative decoding whose length follows each request."
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    serve = commands.add_parser(
        "serve",
        help="serve a pair over HTTP and gRPC, in the foreground",
        description="Serve a pair over HTTP and gRPC until Ctrl-C.",
        epilog="example: dsde serve --pair embedded --policy static --set speculation.settings.length=3",
    )
    _add_settings(serve, _OPTIONS | _SERVING_OPTIONS)
    serve.add_argument(
        "--open",
        dest="access.open",
        action="store_const",
        const=True,
        help="serve this machine without keys [access.open]",
    )
    serve.set_defaults(command=_serve)

    keys = commands.add_parser(
        "keys",
        help="make, list and revoke API keys",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=_KEYS,
        epilog=_KEYS_EXAMPLES,
    )
    _add_keys(keys)

    top = commands.add_parser(
        "top",
        help="watch the replicas of a running application",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Show requests, speed and speculation of every replica, refreshed until Ctrl-C.",
        epilog=_TOP_EXAMPLES,
    )
    top.add_argument(
        "--url", help="Prometheus endpoint that `dsde serve` prints; default: every Ray node on record here"
    )
    top.add_argument("--once", action="store_true", help="print one table and exit")
    top.add_argument("--interval", metavar="SECONDS", type=float, default=2.0, help="time between refreshes (2)")
    top.set_defaults(command=_top)

    engine_args = commands.add_parser(
        "engine-args",
        help="print a pair's vLLM engine arguments",
        description="Print the vLLM engine arguments of a pair as one JSON object, ready for vllm.LLM(**arguments).",
        epilog="example: dsde engine-args --pair bench --policy static",
    )
    _add_settings(engine_args, _OPTIONS)
    engine_args.add_argument("--cli", action="store_true", help="print the `vllm serve` command instead")
    engine_args.set_defaults(command=_engine_args)

    client = commands.add_parser(
        "client",
        help="ask a running server, over HTTP or gRPC",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=_CLIENT,
        epilog=_CLIENT_EXAMPLES,
    )
    _add_client(client)
    client.set_defaults(command=_client)

    chaos = commands.add_parser(
        "chaos",
        help="inject faults into a running application",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=_CHAOS,
        epilog=_CHAOS_EXAMPLES,
    )
    chaos.add_argument("--pid", type=int, metavar="PID", help="process id of `dsde serve` (the only one here)")
    chaos.add_argument("--every", type=float, metavar="SECONDS", default=30.0, help="time between faults (30)")
    chaos.add_argument("--minutes", type=float, metavar="M", default=20.0, help="time for all of them (20)")
    chaos.add_argument("--seed", type=int, metavar="S", default=0, help="seed of the faults (0)")
    chaos.add_argument("--faults", metavar="NAME,...", default="engine,replica,stall", help="(engine,replica,stall)")
    chaos.add_argument("--keep", type=int, metavar="N", default=1, help="engines that must be left running (1)")
    chaos.add_argument("--json", type=Path, metavar="FILE", help="write the report")
    chaos.add_argument("--traffic", type=int, metavar="N", default=0, help="streams to send at once, and to check (0)")
    chaos.add_argument("--url", default="http://127.0.0.1:8000", help="where they go (http://127.0.0.1:8000)")
    chaos.add_argument("--address", default="127.0.0.1:9000", help="where they go over gRPC (127.0.0.1:9000)")
    chaos.add_argument("--api-key", metavar="KEY", help="the server's key, if it asks for one (DSDE_API_KEY)")
    chaos.add_argument("--serve", action="store_true", help="start an application to hurt, instead of a running one")
    chaos.set_defaults(command=_chaos)

    bench = commands.add_parser(
        "bench",
        help="measure policies against each other on real engines",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=_BENCH,
        epilog=_BENCH_EXAMPLES,
    )
    _add_bench(bench)
    bench.set_defaults(command=_bench)

    replay = commands.add_parser(
        "replay",
        help="replay policies on recorded traces, with any step costs",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=_REPLAY,
        epilog=_REPLAY_EXAMPLES,
    )
    _add_replay(replay)
    replay.set_defaults(command=_replay)

    loadtest = commands.add_parser(
        "loadtest",
        help="send traffic to a running server, and report",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=_LOADTEST,
        epilog=_LOADTEST_EXAMPLES,
    )
    _add_loadtest(loadtest)
    loadtest.set_defaults(command=_loadtest)

    simulate = commands.add_parser(
        "simulate",
        help="compare request routers on modelled replicas",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=_SIMULATE,
        epilog=_SIMULATE_EXAMPLES,
    )
    _add_simulate(simulate)
    simulate.set_defaults(command=_simulate)

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


def _add_keys(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    add = actions.add_parser("add", help="make a key and print it", description="Make a key and print it, once.")
    add.add_argument("name", metavar="NAME", help="whose it is, as `dsde keys list` will show it")
    # Values stay text: dsde.access.session checks them and names the option.
    add.add_argument("--expires", metavar="DATE", help="refused from then on, as in 2027-06-30 or 2027-06-30T12:00Z")
    add.add_argument("--requests-per-minute", metavar="N", help="default: limits.requests_per_minute of the server")
    add.add_argument("--tokens-per-minute", metavar="N", help="prompt and answer; default: limits.tokens_per_minute")
    add.add_argument("--concurrency", metavar="N", help="requests at a time; default: limits.concurrency")
    add.set_defaults(command=_keys_add)
    listing = actions.add_parser("list", help="list the keys", description="List the keys: id, name, limits.")
    listing.set_defaults(command=_keys_list)
    revoke = actions.add_parser("revoke", help="end a key", description="End a key; running requests go on.")
    revoke.add_argument("id", metavar="ID", help="its id, or the key itself")
    revoke.set_defaults(command=_keys_revoke)
    for action in (add, listing, revoke):
        action.add_argument("--file", type=Path, default=Path("keys.json"), metavar="FILE", help="key file (keys.json)")


def _add_client(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", help="the question")
    what = parser.add_argument_group("what is asked", "what is not given is the server's choice")
    what.add_argument("--system", metavar="TEXT", help="system message before it")
    what.add_argument("--max-tokens", type=int, metavar="N", help="longest answer")
    what.add_argument("--temperature", type=float, metavar="T", help="0 = greedy")
    what.add_argument("--policy", metavar="NAME", help="speculation policy of this request")
    where = parser.add_argument_group("where")
    where.add_argument("--grpc", action="store_true", help="ask over gRPC instead of HTTP")
    where.add_argument("--url", metavar="URL", help="HTTP server (http://127.0.0.1:8000)")
    where.add_argument("--address", metavar="HOST:PORT", help="gRPC server (127.0.0.1:9000)")
    where.add_argument("--api-key", metavar="KEY", help="the server's key, if it asks for one (DSDE_API_KEY)")
    how = parser.add_argument_group("how it is shown")
    how.add_argument(
        "--stream", action=argparse.BooleanOptionalAction, default=True, help="show tokens as they come (default)"
    )
    how.add_argument("--json", action="store_true", help="print answer and figures as one JSON object")


def _add_bench(parser: argparse.ArgumentParser) -> None:
    # Values stay text: dsde.bench.options checks them and names the option.
    what = parser.add_argument_group("what is measured")
    what.add_argument("--quick", action="store_true", help="batch 1, 8, 24, mix, T=0, at most 12 minutes on 2 cores")
    what.add_argument("--batch", metavar="N,...", help="requests that decode together (1,4,8,16,32)")
    what.add_argument("--load", metavar="N,...", help="one run whose load moves, as in 1,4,16,32,4,1; replaces --batch")
    what.add_argument("--temperature", metavar="T,...", help="sampling temperatures (0,1)")
    what.add_argument("--draft", metavar="NAME,...", help="quality of the draft: high, low (both)")
    what.add_argument("--workload", metavar="NAME,...", help="mix, all, or classes of prompts (all)")
    what.add_argument("--policies", metavar="NAME,...", help="who takes part, see above (everybody)")
    size = parser.add_argument_group("how long")
    size.add_argument("--rounds", metavar="N", help="rounds of each cell, at most (3; --quick: 5)")
    size.add_argument("--tokens", metavar="N", help="tokens per request of a run, at most (64; --quick: 32)")
    size.add_argument("--minutes", metavar="M", help="time for everything; tokens and rounds shrink to fit")
    size.add_argument("--cold", action="store_true", help="count the first steps of a policy that learns, too")
    where = parser.add_argument_group("where the result goes, besides a table")
    where.add_argument("--json", type=Path, metavar="FILE", help="write every figure")
    where.add_argument("--plot", type=Path, metavar="DIR", help="draw the pictures, PNG and SVG")
    where.add_argument(
        "--record",
        type=Path,
        metavar="FILE",
        help="write a trace of drafts and their fate, for replay; one draft only",
    )
    own = parser.add_argument_group("your own models, instead of the pairs bench and bench-low")
    own.add_argument("--target", metavar="MODEL", help="target model; needs --high, --low or both")
    own.add_argument("--high", metavar="MODEL", help="draft model of high acceptance")
    own.add_argument("--low", metavar="MODEL", help="draft model of low acceptance")
    _add_settings(parser, {flag: _OPTIONS[flag] for flag in ("--dtype", "--max-model-len", "--device")})


def _add_replay(parser: argparse.ArgumentParser) -> None:
    # Values stay text: dsde.bench.replay_options checks them and names the option.
    parser.add_argument("file", metavar="FILE[,FILE...]", help="traces, as `dsde bench --record` writes them")
    what = parser.add_argument_group("what is replayed")
    what.add_argument("--policies", metavar="NAME,...", help="who takes part (static,goodput,adaedl,paper,reference)")
    what.add_argument("--batch", metavar="N,...", help="requests that decode together (1,4,8,16,32)")
    what.add_argument("--load", metavar="N,...", help="a load that moves, as in 1,4,16,32,4,1; replaces --batch")
    what.add_argument("--temperature", metavar="T,...", help="of those that were recorded (all)")
    what.add_argument("--workload", metavar="NAME,...", help="mix, all, or classes of prompts in the trace (mix)")
    what.add_argument(
        "--no-trim", action="store_true", help="asynchronous scheduling: drafts keep their planned lengths"
    )
    what.add_argument("--no-oracle", action="store_true", help="leave the two oracles out")
    what.add_argument("--signals", action="store_true", help="instead: what foretells acceptance, and how well")
    what.add_argument("--signal-length", metavar="K", help="draft tokens per step with --signals (4)")
    cost = parser.add_argument_group("what a step takes")
    cost.add_argument(
        "--cost",
        action="append",
        metavar="MODEL",
        help="cpu, gpu-mem, gpu-mixed or BASE,TOKEN,DRAFT[,DRAFT_PER_REQUEST]; several separated by ';' (cpu)",
    )
    cost.add_argument("--sync", metavar="MS", help="added to each draft step that a stop rule watches (0)")
    cost.add_argument("--noise", metavar="SHARE", help="standard deviation of measured step times, relative (0)")
    size = parser.add_argument_group("how long")
    size.add_argument(
        "--steps",
        metavar="N",
        help="work of a cell, and of each stage of --load, in steps of plain decoding (150, or one pass over the trace "
        "up to 1500 tokens)",
    )
    size.add_argument("--tokens", metavar="N", help="the same in tokens; replaces --steps")
    size.add_argument("--warmup", metavar="N", help="steps that are not counted (0)")
    size.add_argument("--held-out", action="store_true", help="warm up on half of the requests, report on the others")
    size.add_argument("--seed", metavar="N", help="order of the requests, and noise (0)")
    where = parser.add_argument_group("where the result goes, besides a table")
    where.add_argument("--json", type=Path, metavar="FILE", help="write every figure")
    where.add_argument("--plot", type=Path, metavar="DIR", help="draw the pictures, PNG and SVG")


def _add_simulate(parser: argparse.ArgumentParser) -> None:
    # Values stay text: dsde.simulate.session checks them and names the option.
    parser.add_argument("--replicas", metavar="N", default="8", help="engine replicas, 1 to 256 (8)")
    parser.add_argument("--load", metavar="SHARE", default="0.7", help="share of what full replicas complete (0.7)")
    parser.add_argument("--mix", metavar="NAME", default="mixed", help="what is sent, see below (mixed)")
    parser.add_argument("--requests", metavar="M", help="requests of a run (250 for each replica)")
    parser.add_argument("--seed", metavar="S", default="0", help="seed of the first run (0)")
    parser.add_argument("--runs", metavar="R", default="1", help="runs, each with the next seed; figures are means (1)")
    parser.add_argument("--policies", metavar="NAME,...", default="all", help="who takes part (all)")
    parser.add_argument("--machine", metavar="NAME", default="gpu-mixed", help="step costs: cpu, gpu-mem, gpu-mixed")
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", action="append", help="recorded acceptance, may be given several times"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw latencies and throughput, as PNG or SVG")


def _add_loadtest(parser: argparse.ArgumentParser) -> None:
    # Values stay text: loadtest.options checks them and names the option.
    what = parser.add_argument_group("what is sent")
    what.add_argument("--quick", action="store_true", help="every class over both protocols, in under 3 minutes")
    what.add_argument("--mix", metavar="CLASS[=WEIGHT],...", help="classes of prompts and their shares (all)")
    what.add_argument("--input", type=Path, metavar="FILE", help="prompts or a trace instead of ours, see below")
    what.add_argument("--max-tokens", metavar="N", help="cap of each answer's length (none; --quick: 24)")
    what.add_argument("--temperature", metavar="T", help="for all requests (each prompt has its own)")
    what.add_argument("--policy", metavar="NAME", help="speculation policy of all requests; --against: of our server")
    what.add_argument("--seed", metavar="N", default="0", help="arrivals, order of prompts, sampling (0)")
    when = parser.add_argument_group("when")
    when.add_argument("--profile", metavar="NAME", help="steady, ramp, burst, diurnal or trace (steady)")
    when.add_argument("--rate", metavar="R", help="requests per second (1; --quick: 0.5)")
    when.add_argument("--peak", metavar="R", help="requests per second at the top (4 times --rate)")
    when.add_argument("--duration", metavar="S", help="time in which requests leave, in seconds (60; --find-rate: 30)")
    when.add_argument("--timeout", metavar="S", help="longest wait for an answer's end (300; --quick: 90)")
    where = parser.add_argument_group("where to")
    where.add_argument("--protocol", metavar="NAME", help="http, grpc or mixed (http; --quick: mixed)")
    where.add_argument("--url", metavar="URL", help="HTTP server (http://127.0.0.1:8000)")
    where.add_argument("--address", metavar="HOST:PORT", help="gRPC server (127.0.0.1:9000)")
    where.add_argument("--api-key", metavar="KEY", help="the server's key, if it asks for one (DSDE_API_KEY)")
    result = parser.add_argument_group("what becomes of it, besides a table")
    result.add_argument("--report", type=Path, metavar="DIR", help="write the report, the records and the figures")
    result.add_argument("--slo-ttft", metavar="MS", default="2000", help="time to first token of a good answer (2000)")
    result.add_argument("--slo-tpot", metavar="MS", default="200", help="time per later token of a good answer (200)")
    instead = parser.add_argument_group("instead")
    instead.add_argument("--compare", nargs=2, type=Path, metavar=("A", "B"), help="two reports side by side")
    instead.add_argument("--find-rate", action="store_true", help="the highest rate with p95 TTFT up to --slo-ttft")
    instead.add_argument("--minutes", metavar="M", default="10", help="time for --find-rate (10)")
    instead.add_argument("--against", metavar="ENGINE", help="vllm, vllm:K or vllm:dsde beside our server, see below")
    instead.add_argument("--rounds", metavar="N", default="2", help="turns of each side of --against (2)")
    instead.add_argument("--aiperf", type=Path, metavar="DIR", help="write the dataset and command line for AIPerf")
    own = ("--pair", "--target", "--draft", "--dtype", "--max-model-len", "--max-length", "--max-num-seqs", "--device")
    _add_settings(parser, {flag: _OPTIONS[flag] for flag in own}, "for the servers that --against starts")


def _add_settings(parser: argparse.ArgumentParser, options: dict[str, _Option], what: str = "each") -> None:
    wins = "wins over the environment (DSDE_SECTION__SETTING) and the file"
    group = parser.add_argument_group("settings", f"{what} {wins}" if what == "each" else f"{what}; each {wins}")
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
    # Read when Ray is imported: a Ray without other machines keeps its own ports on loopback, on Linux too.
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    from dsde.access.gate import Gate, check_access

    check_access(config)
    Gate.of(config)
    from dsde.engine.plugin import model_paths
    from dsde.models.check import check_memory, check_models

    paths = model_paths(config)
    check_models(*paths)
    check_memory(config, *paths)
    from deployments.serve import run

    return int(run(config) or 0)


def _keys_add(options: argparse.Namespace) -> int:
    from dsde.access.session import add

    limits = (options.requests_per_minute, options.tokens_per_minute, options.concurrency)
    return add(options.file, options.name, options.expires, *limits)


def _keys_list(options: argparse.Namespace) -> int:
    from dsde.access.session import show

    return show(options.file)


def _keys_revoke(options: argparse.Namespace) -> int:
    from dsde.access.session import revoke

    return revoke(options.file, options.id)


def _top(options: argparse.Namespace) -> int:
    from dsde.top import run

    return run(options.url, once=options.once, interval_s=options.interval)


def _chaos(options: argparse.Namespace) -> int:
    from dsde.chaos.serving import Place, serving
    from dsde.chaos.session import check, run
    from dsde.chaos.traffic import Traffic

    kinds = options.faults.split(",")
    check(kinds, options.every, options.minutes)
    if options.serve:
        print("starting two replicas of the embedded pair, about a minute", flush=True)
    api_key = None if options.serve else options.api_key or os.environ.get("DSDE_API_KEY")
    given = Place(options.pid, f"{options.url.rstrip('/').removesuffix('/v1')}/v1", options.address)
    with serving() if options.serve else contextlib.nullcontext(given) as place:
        return run(
            place.pid,
            every_s=options.every,
            minutes=options.minutes,
            seed=options.seed,
            kinds=kinds,
            keep=options.keep,
            json_file=options.json,
            traffic=Traffic(place.url, place.address, options.traffic, options.seed, api_key)
            if options.traffic
            else None,
        )


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


def _client(options: argparse.Namespace) -> int:
    unused, way = ("url", "HTTP") if options.grpc else ("address", "gRPC, which --grpc chooses")
    if getattr(options, unused) is not None:
        raise ValueError(f"--{unused} {getattr(options, unused)}: that is the server's place for {way}")
    from dsde.client.exchange import Ask, Question
    from dsde.client.session import run

    ask: Ask
    if options.grpc:
        from dsde.client.rpc import ask_grpc as ask

        where = options.address or "127.0.0.1:9000"
    else:
        from dsde.client.http import ask_http as ask

        where = options.url or "http://127.0.0.1:8000"
    question = Question(options.prompt, options.system, options.max_tokens, options.temperature, options.policy)
    api_key = options.api_key or os.environ.get("DSDE_API_KEY")
    return run(ask, question, where, api_key, options.stream, options.json)


def _bench(options: argparse.Namespace) -> int:
    config = _configuration(options)
    from dsde.bench.options import options as bench_options

    chosen = bench_options(options)
    from dsde.bench.session import enter, run

    enter(config, options.arguments)
    return run(chosen, config)


def _replay(options: argparse.Namespace) -> int:
    from dsde.bench.replay_options import replay_options
    from dsde.bench.replay_session import run

    return run(replay_options(options))


def _loadtest(options: argparse.Namespace) -> int:
    settings = {name: value for name, value in vars(options).items() if "." in name and value is not None}
    if options.against is None and (settings or options.extra or options.config is not None):
        raise ValueError("settings are for the servers that --against starts; a running server has its own")
    from loadtest.options import options as loadtest_options

    chosen = loadtest_options(options)
    from loadtest.session import compare, run

    if options.compare is not None:
        first, second = options.compare
        return compare(first, second, chosen.slo, chosen.report)
    if options.against is None:
        return run(chosen)
    if options.policy is not None:
        setattr(options, "speculation.policy", options.policy)
    from loadtest.against import run as run_against

    return run_against(chosen, _configuration(options))


def _simulate(options: argparse.Namespace) -> int:
    from dsde.simulate.session import run

    return run(options)


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
