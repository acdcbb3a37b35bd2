"""Run Lightning's own tests with accelight's strategies, and print what fails with these alone.

The tests of a release run three times: as they are, with `ddp`, and with each strategy of ours, where a Trainer that
names none gets it. A test counts that passes the first two times. Failures that are known are listed in
docs/compatibility.md with their reasons; a failure that is not on the list, or a listed one that passes now, ends this
with status 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

from tools.conformance.known import COMPATIBILITY, KnownFailure, judge, read_known_failures
from tools.conformance.plugin import DDP, OURS, PLAIN
from tools.conformance.processes import Outcomes, TestProcesses
from tools.conformance.report import DEFAULT_PATHS, failures, table
from tools.conformance.source import lightning_source, release_of


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.lightning_conformance", description=__doc__)
    parser.add_argument(
        "paths",
        nargs="*",
        default=list(DEFAULT_PATHS),
        metavar="PATH",
        help=f"files, folders or tests, from tests/tests_pytorch on; default {' '.join(DEFAULT_PATHS)}",
    )
    parser.add_argument(
        "--source",
        type=Path,
        help="a checkout of pytorch-lightning, or an archive of one; default: clones the release that is installed",
    )
    parser.add_argument(
        "--strategy", action="append", choices=list(OURS), help="may be given several times; default: each of them"
    )
    parser.add_argument("--devices", type=int, choices=[1, 2], default=1, help="processes of a test, default 1")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds for one test, default 60")
    parser.add_argument("--jobs", type=int, default=1, help="tests (or files of tests) at the same time, default 1")
    parser.add_argument("--known", type=Path, default=COMPATIBILITY, help="list of known failures, a Markdown table")
    arguments = parser.parse_args(given)
    if arguments.jobs < 1 or arguments.timeout <= 0:
        parser.error(f"--jobs {arguments.jobs} --timeout {arguments.timeout:g}: both have to be above 0")
    return arguments


def main(given: Sequence[str] | None = None) -> int:
    """Run the tests and print the table; return the exit status."""
    arguments = _arguments(given)
    installed = version("lightning")
    known = read_known_failures(arguments.known)
    with lightning_source(arguments.source, installed) as source:
        release = release_of(source)
        if release not in (None, installed):
            print(f"These are the tests of Lightning {release}, and {installed} is installed.", file=sys.stderr)
        return _examine(source, arguments, arguments.strategy or list(OURS), known)


def _examine(source: Path, arguments: argparse.Namespace, kinds: Sequence[str], known: Sequence[KnownFailure]) -> int:
    preload = ["accelight.strategies.fsdp.strategy"]
    if any(kind.startswith("zero") for kind in kinds):
        preload += ["deepspeed", "accelight.strategies.deepspeed.strategy"]
    processes = TestProcesses(source, timeout_s=arguments.timeout, num_jobs=arguments.jobs, preload=preload)
    tests, unreadable = processes.collect(arguments.paths)
    for file, why in unreadable.items():
        print(f"cannot be imported: {file}: {why}", file=sys.stderr)
    if not tests:
        raise RuntimeError(f"There is no test in {', '.join(arguments.paths)} of {source / 'tests/tests_pytorch'}.")

    def run(kind: str, among: Sequence[str], devices: int) -> Outcomes:
        return processes.run(among, kind, devices, _progress(kind, len(among)))

    plain = run(PLAIN, tests, 1)
    candidates = [test for test in tests if test in plain.passed]
    ddp = run(DDP, candidates, arguments.devices)
    counted = [test for test in candidates if test in ddp.passed]
    print(
        f"{len(tests)} tests: {len(plain.skipped)} are skipped, {len(plain.failed)} fail without accelight, "
        f"{len(candidates) - len(counted)} do not pass with ddp. On {arguments.devices} process(es):\n"
    )
    failed = {kind: _not_passed(run(kind, counted, arguments.devices), counted) for kind in kinds}
    judgement = judge(known, counted, failed, arguments.devices)
    print(table(counted, failed), failures(judgement), sep="\n\n")
    return 1 if judgement.unlisted or judgement.passing else 0


def _not_passed(outcomes: Outcomes, tests: Sequence[str]) -> dict[str, str]:
    return {test: outcomes.failed.get(test, "is skipped") for test in tests if test not in outcomes.passed}


def _progress(kind: str, total: int) -> Callable[[int], None]:
    """Return what prints how many tests have run: in place on a terminal, else at each tenth."""
    done = 0

    def told(number: int) -> None:
        nonlocal done
        before, done = done, done + number
        if sys.stderr.isatty():
            print(f"\r{kind}: {done} of {total}", end="\n" if done == total else "", file=sys.stderr, flush=True)
        elif done == total or before * 10 // total != done * 10 // total:
            print(f"{kind}: {done} of {total}", file=sys.stderr, flush=True)

    return told


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (OSError, RuntimeError, ValueError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)
