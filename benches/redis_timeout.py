#!/usr/bin/env python3
"""Measures the share of requests that fail because Redis or the service has a CPU limit.

usage, as root: redis_timeout.py PATH_OF_SLUICEGATE [SECONDS]

Each run starts Redis and the service in cgroups of their own, limits the CPU time of one of them, and sends requests with
h2load. With a limit on Redis, another client uses the same Redis, either all the time or in bursts of 60 ms. The table in
docs/guides/redis.md is from this script. On a busy machine Redis gets its CPU time in small parts, so it stops for shorter
times."""

import os
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

PERIOD_US = 100_000
RULES = "domain: t\ndescriptors: [{key: user, rate_limit: {unit: hour, requests_per_unit: 4000000000}}]\n"
BUSY_SCRIPT = "local x = 0 for i = 1, 40000 do x = x + i end return x"  # about a millisecond
METHOD = "envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit"


class Group:
    """A cgroup with a limit of CPU time, version 1 or 2."""

    def __init__(self, name, cores):
        v2 = os.path.exists("/sys/fs/cgroup/cgroup.controllers")
        self.path = f"/sys/fs/cgroup{'' if v2 else '/cpu'}/sluicegate-bench-{name}"
        os.makedirs(self.path, exist_ok=True)
        self.procs = f"{self.path}/cgroup.procs"
        quota = int(cores * PERIOD_US) if cores else None
        if v2:
            self.write("cpu.max", f"{quota or 'max'} {PERIOD_US}")
        else:
            self.write("cpu.cfs_period_us", str(PERIOD_US))
            self.write("cpu.cfs_quota_us", str(quota or -1))

    def write(self, name, value):
        with open(f"{self.path}/{name}", "w") as file:
            file.write(value)

    def start(self, args, **options):
        def enter():
            with open(self.procs, "w") as file:
                file.write(str(os.getpid()))

        return subprocess.Popen(args, preexec_fn=enter, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **options)

    def throttled(self):
        with open(f"{self.path}/cpu.stat") as file:
            return int(dict(line.split() for line in file)["nr_throttled"])


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def wait_for_port(port):
    for _ in range(600):
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except OSError:
            time.sleep(0.05)
    sys.exit(f"nothing listens on port {port}")


def field(number, value):
    return bytes([number << 3 | 2, len(value)]) + value


def message():
    """Returns a framed RateLimitRequest for one user."""
    entry = field(1, b"user") + field(2, b"alice")
    request = field(1, b"t") + field(2, field(1, entry))
    return b"\0" + struct.pack(">I", len(request)) + request


def metrics(port):
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60).read().decode()
    lines = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in lines}


def total(values, start):
    return sum(value for name, value in values.items() if name.startswith(start))


def use_redis(port, is_permanent, stop):
    """Runs scripts of a millisecond until `stop` is set."""
    connection = socket.create_connection(("127.0.0.1", port))
    command = f"*3\r\n$4\r\nEVAL\r\n${len(BUSY_SCRIPT)}\r\n{BUSY_SCRIPT}\r\n$1\r\n0\r\n".encode()
    while not stop.is_set():
        end = time.monotonic() + 0.06
        while is_permanent or time.monotonic() < end:
            connection.sendall(command)
            connection.recv(1000)
            if stop.is_set():
                return
        time.sleep(0.44)


def measure(binary, folder, seconds, limited, cores, timeout, other_client):
    redis_port, grpc, http = free_port(), free_port(), free_port()
    redis_group = Group("redis", cores if limited == "redis" else None)
    service_group = Group("service", cores if limited == "service" else None)
    redis = redis_group.start(["redis-server", "--port", str(redis_port), "--bind", "127.0.0.1", "--save", ""])
    wait_for_port(redis_port)
    args = [binary, "--rules", folder, "--store", f"redis://127.0.0.1:{redis_port}"]
    args += ["--grpc-addr", f"127.0.0.1:{grpc}", "--http-addr", f"127.0.0.1:{http}"]
    environment = dict(os.environ, SLUICEGATE__REDIS__TIMEOUT=timeout, SLUICEGATE__SHUTDOWN__DELAY="0s")
    service = service_group.start(args, env=environment)
    try:
        wait_for_port(http)
        stop = threading.Event()
        if other_client:
            threading.Thread(target=use_redis, args=(redis_port, other_client == "permanent", stop), daemon=True).start()
        load = ["h2load", "-D", str(seconds), "-c", "10", "-m", "20", "-d", f"{folder}/.body"]
        load += ["-H", "content-type: application/grpc", "-H", "te: trailers"]
        if limited != "service":
            load += ["--rps", "200"]
        subprocess.run(load + [f"http://127.0.0.1:{grpc}/{METHOD}"], stdout=subprocess.DEVNULL, check=True)
        stop.set()
        values = metrics(http)
        requests = total(values, "ratelimit_service_total_requests")
        failed = total(values, "sluicegate_on_error_total")
        throttled = redis_group.throttled() + service_group.throttled()
        print(f"| {limited} | {cores} | {other_client or ''} | {timeout} | {requests / seconds:.0f}", end=" ")
        print(f"| {100 * failed / requests:.2f}% | {throttled} |", flush=True)
    finally:
        for process in (service, redis):
            process.terminate()
            process.wait()
        for group in (service_group, redis_group):
            os.rmdir(group.path)


def main():
    binary = sys.argv[1]
    seconds = int(sys.argv[2]) if len(sys.argv) > 2 else 10
    with tempfile.TemporaryDirectory() as folder:
        with open(f"{folder}/t.yaml", "w") as file:
            file.write(RULES)
        with open(f"{folder}/.body", "wb") as file:
            file.write(message())
        print("| limited | cores | other client | timeout | requests/s | failed | stops |")
        print("| --- | ---: | --- | --- | ---: | ---: | ---: |")
        for other_client in ("permanent", "bursts"):
            for cores in (0.25, 0.5, 1):
                for timeout in ("20ms", "50ms", "100ms"):
                    measure(binary, folder, seconds, "redis", cores, timeout, other_client)
        for cores in (0.25, 0.5, 1):
            for timeout in ("20ms", "50ms", "100ms"):
                measure(binary, folder, seconds, "service", cores, timeout, None)


main()
