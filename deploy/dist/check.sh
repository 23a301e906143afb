#!/usr/bin/env bash
# Starts a program of a release, and checks that it is healthy, decides a request and stops at SIGTERM.
#
#   deploy/dist/check.sh PROGRAM [EMULATOR]
#
# An emulator such as qemu-aarch64-static runs the program of another architecture. The service listens on free ports of
# this host, with the built-in rules and counters in memory.
set -euo pipefail

program=$1
command=(${2:+"$2"} "$program")
log=$(mktemp)
pid=

# Prints a message and the log of the service, and exits.
fail() { echo "deploy/dist/check.sh: $program: $1" >&2 && cat "$log" >&2 && exit 1; }

# Stops the service if it still runs, and removes the log.
clean_up() {
  [ -z "$pid" ] || kill -KILL "$pid" 2>/dev/null || true
  rm -f "$log"
}
trap clean_up EXIT

# Repeats a command until it succeeds, for at most a minute: an emulator needs seconds to start the program.
wait_for() {
  for _ in {1..600}; do
    "$@" && return
    sleep 0.1
  done
  return 1
}

# Sets `http` to the address in the log. Exits if the service has ended.
find_address() {
  http=$(sed -n 's/.*"http":"\([^"]*\)".*/\1/p' "$log")
  [ -n "$http" ] || kill -0 "$pid" 2>/dev/null || fail "the service ended at its start"
  [ -n "$http" ]
}

has_ended() { ! kill -0 "$pid" 2>/dev/null; }

# Only these variables, because those of the caller can be settings.
env -i SLUICEGATE__TELEMETRY__LOG__FORMAT=json SLUICEGATE__SHUTDOWN__DELAY=0s \
  "${command[@]}" serve --store memory --grpc-addr 127.0.0.1:0 --http-addr 127.0.0.1:0 >"$log" 2>&1 &
pid=$!
wait_for find_address || fail "the service does not listen after a minute"

health=$("${command[@]}" health --http-addr "$http" 2>&1) || fail "health check: $health"

request='{"domain": "example", "descriptors": [{"entries": [{"key": "user", "value": "bob"}]}]}'
response=$(curl --silent --show-error --max-time 10 --data "$request" "http://$http/json" 2>&1) || fail "decision: $response"
[[ $response == '{"overallCode":"OK",'*'"limitRemaining":2,'* ]] || fail "decision: $response"

kill -TERM "$pid"
wait_for has_ended || fail "the service still runs a minute after SIGTERM"
wait "$pid" && code=0 || code=$?
pid=
[ "$code" = 0 ] || fail "exit code $code after SIGTERM"
echo "$program: healthy ($health), decided a request, stopped at SIGTERM"
