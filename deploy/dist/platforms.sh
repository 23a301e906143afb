#!/usr/bin/env bash
# Checks that service and client compile for macOS and Windows without warnings.
#
# Needs no SDK: `cargo check` links nothing, and Zig has the headers that the C code (mimalloc, ring) includes.
set -euo pipefail
cd "$(dirname "$0")/../.."
. deploy/dist/tools.sh

install_compilers aarch64-apple-darwin x86_64-pc-windows-gnu
use_zig aarch64-apple-darwin aarch64-macos
use_zig x86_64-pc-windows-gnu x86_64-windows-gnu
RUSTFLAGS="-D warnings" cargo check --locked --workspace --lib --bins --all-features \
  --target aarch64-apple-darwin --target x86_64-pc-windows-gnu
