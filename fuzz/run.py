#!/usr/bin/env python3
"""Runs the fuzz targets with libFuzzer, one after the other, and prints a table of what each did.

Needs cargo-fuzz (`cargo install cargo-fuzz --locked`). Inputs that reach new code are added to fuzz/corpus, and inputs
that fail are written to fuzz/artifacts. A failing input becomes a test when it is moved to the target's folder in
fuzz/seeds.
"""

import argparse
import os
import pathlib
import re
import subprocess
import sys

FUZZ = pathlib.Path(__file__).resolve().parent
# Time after which one input counts as hung, the memory that one target may use, and the maximum length of an input.
LIMITS = ["-timeout=30", "-rss_limit_mb=4096", "-max_len=131072"]


def main():
    names = sorted(path.stem for path in (FUZZ / "fuzz_targets").glob("*.rs"))
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--seconds", type=int, default=60, help="time for each target [60]")
    arguments.add_argument("--executions", type=int, default=-1, help="stop a target earlier after so many inputs")
    arguments.add_argument("--seed", type=int, default=0, help="seed of the random changes [random]")
    arguments.add_argument("targets", nargs="*", metavar="TARGET", help=f"one of {', '.join(names)} [all]")
    arguments = arguments.parse_args()
    if unknown := set(arguments.targets) - set(names):
        sys.exit(f"unknown target {unknown.pop()}; there are {', '.join(names)}")
    # Rust's own checks find mistakes in safe code, so no sanitizer is needed, and the stable compiler is sufficient.
    if subprocess.run(["cargo", "fuzz", "build", "--sanitizer", "none"], cwd=FUZZ.parent).returncode:
        sys.exit("the targets cannot be built; is cargo-fuzz installed (cargo install cargo-fuzz --locked)?")
    print("| target | executions | per second | branches reached | failed |\n| --- | ---: | ---: | ---: | --- |")
    failures = [name for name in arguments.targets or names if not run(name, arguments)]
    if failures:
        sys.exit(f"failed: {', '.join(failures)}; see fuzz/artifacts")


def run(name, arguments):
    """Runs one target and prints its row. Returns whether no input failed."""
    corpus, artifacts = FUZZ / "corpus" / name, FUZZ / "artifacts" / name
    corpus.mkdir(parents=True, exist_ok=True)
    artifacts.mkdir(parents=True, exist_ok=True)
    program = next((FUZZ / "target").glob(f"*/release/{name}"))
    options = [f"-max_total_time={arguments.seconds}", f"-runs={arguments.executions}", f"-seed={arguments.seed}"]
    options += [f"-artifact_prefix={artifacts}/", "-print_final_stats=1", *LIMITS]
    command = [program, *options, corpus, FUZZ / "seeds" / name]
    # Some targets write files.
    environment = {**os.environ, "TMPDIR": "/dev/shm"} if os.path.isdir("/dev/shm") else None
    log = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace")
    (artifacts / "log").write_text(log.stderr)
    statistics = dict(re.findall(r"stat::(\w+):\s+(\d+)", log.stderr))
    branches = re.findall(r"cov: (\d+)", log.stderr)
    executions, rate = (int(statistics.get(key, 0)) for key in ("number_of_executed_units", "average_exec_per_sec"))
    failed = "yes" if log.returncode else "no"
    print(f"| {name} | {executions:,} | {rate:,} | {int(branches[-1]) if branches else 0:,} | {failed} |", flush=True)
    return not log.returncode


if __name__ == "__main__":
    main()
