#!/usr/bin/env python3
"""Prints where the instructions and the time of one decision are spent.

`make profile` runs it after a release build. It needs h2load, valgrind, perf, addr2line and redis-server, and at least two
cores. Each workload runs twice, with one worker: under callgrind, which counts instructions of the process without the
kernel, and under perf, which samples the time of the process and of the kernel on its behalf.

An instruction belongs to the crate or module of its source line, also if the compiler has inlined it elsewhere. Lines of
the standard library and of small containers belong to their caller.

A second table counts allocations by the function that makes them.

`benches/profile.py --against PROGRAM` compares the CPU time of a decision with that of another build, in paired rounds.
"""

import collections
import os
import pathlib
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parent.parent
SERVICE = ROOT / "target/release/sluicegate"
UNARY = "envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit"
STREAM = "sluicegate.v1.DecisionService/Stream"
CHECKS_PER_FRAME, FRAMES_PER_CALL = 16, 64
RULES = "domain: bench\ndescriptors: [{key: user, rate_limit: {unit: day, requests_per_unit: 4000000000}}]\n"

# The first pattern that a file name or symbol contains decides. Files without a match belong to their caller.
PARTS = [
    ("HPACK (h2)", r"/h2-[^/]*/src/hpack|\bh2::hpack::"),
    ("frames and streams (h2)", r"/h2-|\bh2::"),
    ("connection and body (hyper)", r"/hyper(-util)?-\d|\bhyper::"),
    ("headers (http)", r"/http(-body)?(-util)?-\d|\bhttp::header"),
    ("runtime and sockets (tokio, mio)", r"/(tokio|tokio-util|mio|socket2|futures-[a-z]+)-\d|\btokio::"),
    ("Redis client (redis)", r"/(redis|combine)-\d|\bredis::"),
    ("decode", r"src/transport/(grpc/(message|limits)|decisions/(decode|feedback))|/prost-\d|crates/wire/src|proto/src"),
    ("encode", r"src/transport/(decisions/(encode|exact|headers)|errors)"),
    ("dispatch", r"src/transport"),
    ("match rules, build keys", r"crates/(rules|engine|placement)/src/"),
    ("statistics", r"src/telemetry/|crates/(metrics|simulator)/"),
    ("algorithm", r"crates/algorithm/src/"),
    ("store", r"src/(store|service|app)/|crates/(store|redis|local|cache|deadline|metrics)/src/|/(sha2|digest|foldhash)-\d"),
    ("allocator (mimalloc)", r"mimalloc|\bmi_|_mi_"),
    ("copies (memcpy, memmove)", r"mem(cpy|move|set|cmp)"),
    ("system calls (libc)", r"libc|syscall|pthread|epoll|recv|send|writev|clock_gettime|vdso|ld-linux"),
]
PARTS = [(name, re.compile(pattern)) for name, pattern in PARTS]
OTHER = "other"

# Functions that allocate, and those of the standard library through which vectors grow.
ALLOCATES = re.compile(r"^mi_(malloc|zalloc|realloc)_aligned$|alloc::raw_vec::.*(reserve|grow)")
GROWS = re.compile(r"alloc::raw_vec::")


def part_of(*names):
    """Returns the part to which the first known of these file names and symbols belongs, the innermost first."""
    for name in names:
        for part, pattern in PARTS:
            if pattern.search(name):
                return part
    return OTHER


def varint(number):
    encoded = b""
    while number > 0x7F:
        encoded += bytes([number & 0x7F | 0x80])
        number >>= 7
    return encoded + bytes([number])


def field(number, value):
    """Encodes a field of protobuf: a number or bytes."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def grpc_frame(message):
    return b"\0" + len(message).to_bytes(4, "big") + message


def request():
    entry = field(1, b"user") + field(2, b"alice")
    return field(1, b"bench") + field(2, field(1, entry))


def stream_body():
    checks = (field(1, field(1, number + 1) + field(2, request())) for number in range(CHECKS_PER_FRAME))
    return grpc_frame(b"".join(checks)) * FRAMES_PER_CALL


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def wait_until_ready(port, deadline=60):
    end = time.monotonic() + deadline
    while time.monotonic() < end:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=1)
            return
        except OSError:
            time.sleep(0.05)
    sys.exit("the service is not ready")


class Workload:
    """Calls of one kind: the store, the method, the body of a call, and the number of decisions in it."""

    def __init__(self, name, store, method, body, decisions):
        self.name, self.store, self.method, self.body, self.decisions = name, store, method, body, decisions

    def start(self, folder, prefix=(), program=SERVICE):
        rules = pathlib.Path(folder, "rules")
        rules.mkdir(exist_ok=True)
        (rules / "bench.yaml").write_text(RULES)
        self.grpc, http = free_port(), free_port()
        settings = {"WORKERS": "1", "REDIS__TIMEOUT": "10s", "DENY_CACHE__MAX_ENTRIES": "0"}
        environment = os.environ | {f"SLUICEGATE__{name}": value for name, value in settings.items()}
        addresses = ["--grpc-addr", f"127.0.0.1:{self.grpc}", "--http-addr", f"127.0.0.1:{http}"]
        command = [*prefix, program, "--rules", rules, "--store", self.store, *addresses]
        process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
        wait_until_ready(http)
        return process

    def load(self, folder, calls):
        """Makes calls on 10 connections with 20 streams each."""
        body = pathlib.Path(folder, "body")
        body.write_bytes(self.body)
        url = f"http://127.0.0.1:{self.grpc}/{self.method}"
        headers = ["-H", "content-type: application/grpc", "-H", "te: trailers"]
        command = ["h2load", "-n", str(calls), "-c", "10", "-m", "20", "-d", body, *headers, url]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        if f"{calls} succeeded" not in output:
            sys.exit(output)


def instructions(workload, calls):
    """Returns the instructions of each part, and the allocations of each function, per decision."""
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/callgrind"
        options = ["--instr-atstart=no", f"--callgrind-out-file={out}"]
        process = workload.start(folder, ["valgrind", "-q", "--tool=callgrind", *options])
        workload.load(folder, max(calls // 10, 200))
        subprocess.run(["callgrind_control", "-i", "on", str(process.pid)], check=True, capture_output=True)
        workload.load(folder, calls)
        subprocess.run(["callgrind_control", "-i", "off", str(process.pid)], check=True, capture_output=True)
        process.send_signal(signal.SIGTERM)
        process.wait()
        costs, allocations = collections.Counter(), collections.Counter()
        for file in pathlib.Path(folder).glob("callgrind*"):
            read_callgrind(file, costs, allocations)
    decisions = calls * workload.decisions
    return tuple({name: count / decisions for name, count in counts.items()} for counts in (costs, allocations))


def read_callgrind(file, costs, allocations):
    """Adds the own cost of each line by part, and the allocations by function (format:
    valgrind.org/docs/manual/cl-format.html)."""
    names, called = {}, ""
    place = {"ob": "", "fl": "", "fi": "", "fn": ""}
    is_call = False

    def name_of(kind, text):
        # A name is written once, as "(number) name", and as "(number)" afterwards. Files share their numbers.
        number, _, name = text.partition(" ")
        kind = "fl" if kind in ("fi", "fe") else kind
        if name:
            names[kind, number] = name
        return names.get((kind, number), text)

    for line in file.open():
        line = line.rstrip("\n")
        kind, is_place, text = line.partition("=")
        if is_place and kind in ("ob", "fl", "fi", "fe", "fn"):
            name = name_of(kind, text)
            if kind in ("fi", "fe"):
                place["fi"] = name
            else:
                place[kind] = name
            if kind == "fl":
                place["fi"] = name
        elif is_place and kind in ("cfn", "cob", "cfi", "cfl"):
            name = name_of({"cfi": "fl", "cfl": "fl"}.get(kind, kind[1:]), text)
            called = name if kind == "cfn" else called
        elif line.startswith("calls="):
            is_call = True
            if ALLOCATES.search(called) and not GROWS.search(place["fn"]):
                allocations[place["fn"]] += int(text.split()[0])
        elif line and (line[0].isdigit() or line[0] in "+-*"):
            if is_call:
                is_call = False  # the cost of the called function, which is counted there
                continue
            cost = int(line.split()[-1]) if len(line.split()) > 1 else 0
            costs[part_of(place["fi"], place["fl"], place["fn"], place["ob"])] += cost


def nanoseconds(workload, calls):
    """Returns the CPU nanoseconds per decision of each part, of the kernel, and of the whole process."""
    with tempfile.TemporaryDirectory() as folder:
        process = workload.start(folder)
        workload.load(folder, calls // 5)
        maps = pathlib.Path(f"/proc/{process.pid}/maps").read_text().splitlines()
        base = int(next(line for line in maps if str(SERVICE) in line).split("-")[0], 16)
        data = f"{folder}/perf"
        record = ["perf", "record", "-q", "-e", "cpu-clock", "-F", "4999", "-p", str(process.pid), "-o", data]
        recorder = subprocess.Popen(record, stderr=subprocess.DEVNULL)
        time.sleep(1)  # perf prints nothing when it has started
        before = cpu_seconds(process.pid)
        workload.load(folder, calls)
        per_decision = 1e9 / (calls * workload.decisions)
        user, kernel = ((end - start) * per_decision for start, end in zip(before, cpu_seconds(process.pid)))
        recorder.send_signal(signal.SIGINT)
        recorder.wait()
        process.send_signal(signal.SIGTERM)
        process.wait()
        samples = subprocess.run(
            ["perf", "script", "-i", data, "-F", "ip,sym,dso"], capture_output=True, text=True, check=True
        ).stdout
    counts, addresses = collections.Counter(), collections.Counter()
    for sample in samples.splitlines():
        address, _, rest = sample.strip().partition(" ")
        symbol, _, library = rest.rpartition(" (")
        if "[kernel" in library:
            continue  # without a hardware counter, the clock of the samples stands still in parts of the kernel
        if library.rstrip(")").endswith(SERVICE.name):
            addresses[int(address, 16) - base] += 1
        else:
            counts[part_of(symbol, library)] += 1
    for part, count in locate(addresses).items():
        counts[part] += count
    return {"kernel": kernel} | {part: user * count / counts.total() for part, count in counts.items()}


def cpu_seconds(pid):
    """Returns the CPU time of a process in its own code and in the kernel."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return [int(fields[index]) / os.sysconf("SC_CLK_TCK") for index in (11, 12)]


def locate(addresses):
    """Sums the samples of addresses by part. addr2line lists the functions of each address, the innermost first."""
    counts, ordered = collections.Counter(), list(addresses)
    text = "\n".join(hex(address) for address in ordered)
    command = ["addr2line", "-a", "-i", "-f", "-e", SERVICE]
    lines = subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout.splitlines()
    frames = []
    for line in lines:
        if re.fullmatch(r"0x[0-9a-f]{16}", line):
            frames.append([])
        else:
            frames[-1].append(line)
    for address, names in zip(ordered, frames, strict=True):
        # Pairs of a function and its file.
        files, functions = names[1::2], names[0::2]
        counts[part_of(*files, *functions)] += addresses[address]
    return counts


def print_table(workload, scale):
    (ir, allocations), ns = instructions(workload, scale // 30), nanoseconds(workload, scale)
    print(f"\n{workload.name}: {sum(ir.values()):.0f} instructions, {sum(ns.values()):.0f} ns\n")
    print("| part | instructions | % | ns | % |\n| --- | ---: | ---: | ---: | ---: |")
    for part in sorted(ir.keys() | ns.keys(), key=lambda part: -ns.get(part, 0)):
        share = lambda costs: 100 * costs.get(part, 0) / sum(costs.values())
        print(f"| {part} | {ir.get(part, 0):.0f} | {share(ir):.1f} | {ns.get(part, 0):.0f} | {share(ns):.1f} |")
    print(f"\n{sum(allocations.values()):.1f} allocations\n\n| function | allocations |\n| --- | ---: |")
    for function, count in sorted(allocations.items(), key=lambda item: -item[1]):
        if count >= 0.05:
            print(f"| `{function}` | {count:.1f} |")


def compare(workload, calls, other, rounds=15):
    """Prints the CPU time of a decision of both programs, which take turns, and the quartiles of the ratios."""
    with tempfile.TemporaryDirectory() as folder:
        ports, processes, times = {}, {}, {SERVICE: [], other: []}
        for program in times:
            processes[program] = workload.start(folder, program=program)
            ports[program] = workload.grpc
        for _ in range(rounds + 1):
            for program in times:
                workload.grpc = ports[program]
                before = sum(cpu_seconds(processes[program].pid))
                workload.load(folder, calls)
                spent = sum(cpu_seconds(processes[program].pid)) - before
                times[program].append(1e9 * spent / (calls * workload.decisions))
        for process in processes.values():
            process.send_signal(signal.SIGTERM)
            process.wait()
    # The first round warms up.
    first, second = (each[1:] for each in times.values())
    low, middle, high = statistics.quantiles([b / a for a, b in zip(first, second)], n=4)
    print(f"{workload.name}: {statistics.median(first):.0f} ns and {statistics.median(second):.0f} ns,", end=" ")
    print(f"{middle:.3f} × (quartiles {low:.3f} and {high:.3f}, {rounds} rounds)")


def main():
    arguments = sys.argv[1:]
    other = pathlib.Path(arguments[1]) if arguments[:1] == ["--against"] else None
    with tempfile.TemporaryDirectory() as folder:
        socket_path = f"{folder}/redis.sock"
        redis = subprocess.Popen(
            ["redis-server", "--port", "0", "--unixsocket", socket_path, "--save", "", "--dir", folder],
            stdout=subprocess.DEVNULL,
        )
        try:
            unary = grpc_frame(request())
            workloads = {
                "memory": (Workload("Memory, one call per decision", "memory", UNARY, unary, 1), 300_000),
                "redis": (Workload("Redis, one call per decision", f"redis+unix://{socket_path}", UNARY, unary, 1), 300_000),
                "stream": (
                    Workload(
                        "Memory, stream with 16 checks in a frame",
                        "memory",
                        STREAM,
                        stream_body(),
                        CHECKS_PER_FRAME * FRAMES_PER_CALL,
                    ),
                    3_000,
                ),
            }
            for name in (arguments[2:] if other else arguments) or workloads:
                compare(*workloads[name], other) if other else print_table(*workloads[name])
        finally:
            redis.terminate()
            redis.wait()


if __name__ == "__main__":
    main()
