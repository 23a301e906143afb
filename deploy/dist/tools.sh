# Sourced by the scripts of this folder, in the root of the repository: the versions of the compilers, and their installation.

export RUSTUP_TOOLCHAIN=1.95.0
python_packages="ziglang==0.17.1 certifi==2026.10.19.post1"

tools=$PWD/target/dist-tools # installed compilers and packagers
site=$tools/python

# Prints a message and exits.
fail() { echo "$0: $1" >&2 && exit 1; }

# Installs Rust with the standard libraries of these targets, and the Python packages in target/dist-tools.
install_compilers() {
  command -v rustup >/dev/null || fail "rustup is required, for the standard library of other targets"
  rustc --version >/dev/null 2>&1 || rustup toolchain install --profile minimal "$RUSTUP_TOOLCHAIN"
  rustup --quiet target add "$@"
  if [ "$(cat "$tools/installed" 2>/dev/null || true)" != "$python_packages" ]; then
    rm -rf "$tools"
    python3 -m venv "$tools"
    # shellcheck disable=SC2086
    "$tools/bin/pip" install --quiet --disable-pip-version-check --target "$site" $python_packages
    echo "$python_packages" >"$tools/installed"
  fi
}

# Makes Zig the C compiler of Rust's target $1, which has the name $2 in Zig.
#
# cc passes Rust's name of the target; Zig knows it under another name, and the last one counts. mimalloc contains the
# time of its compilation, and Cargo does not compile it again for another commit, so this time is constant.
# Zig checks for undefined behaviour in builds without optimisation, with functions that Rust does not link.
use_zig() {
  printf '#!/bin/sh\nSOURCE_DATE_EPOCH=0 exec "%s/ziglang/zig" cc "$@" -target %s -fno-sanitize=undefined\n' \
    "$site" "$2" >"$tools/cc-$1"
  chmod +x "$tools/cc-$1"
  export "CC_${1//-/_}=$tools/cc-$1" "ZIG_GLOBAL_CACHE_DIR=$tools/zig-cache"
}
