#!/usr/bin/env bash
# Builds the files of a release in target/dist. docs/design/releases.md describes them, and how to reproduce them.
#
# A commit gives the same bytes in each folder and on each day: compilers have fixed versions, paths are remapped, and
# the time of each file is that of the commit. The C code (mimalloc, ring) is compiled by Zig, one Python package with
# musl's headers for both architectures, and linked by the linker that comes with Rust. Debian's cross compiler for ARM
# is for glibc, and the bytes would depend on the release of Debian.
set -euo pipefail
cd "$(dirname "$0")/../.."
umask 022
. deploy/dist/tools.sh

cargo_deb=3.8.0
declare -A debian=([x86_64]=amd64 [aarch64]=arm64)
architectures=(x86_64 aarch64)

work=target/dist-build # intermediate files
out=target/dist        # the release

# Packs the contents of the folder $1 without the properties of this machine; further arguments are passed to tar.
pack() {
  tar --directory "$1" --sort=name --format=ustar --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner \
    --create "${@:2}"
}

# Prints the emulator that runs programs of an architecture, or nothing on a machine of this architecture.
emulator() { [ "$1" = "$(uname -m)" ] || echo "qemu-$1-static"; }

# Installs the pinned tools in target/dist-tools.
install_tools() {
  local arch name
  for arch in "${architectures[@]}"; do
    name=$(emulator "$arch")
    [ -z "$name" ] || command -v "$name" >/dev/null || fail "$name is required, to run the program (qemu-user-static)"
  done
  install_compilers "${architectures[@]/%/-unknown-linux-musl}"
  cargo install --quiet --locked "cargo-deb@$cargo_deb" --root "$tools"
}

# Compiles the program for all architectures: stripped and statically linked with musl.
compile() {
  cargo fetch --quiet --locked
  local flags=(-Clink-self-contained=yes "--remap-path-prefix=$PWD=/sluicegate") targets=() sources sysroot arch name
  for sources in "${CARGO_HOME:-$HOME/.cargo}"/registry/src/*; do
    flags+=("--remap-path-prefix=$sources=/crates")
  done
  sysroot=$(rustc --print sysroot)
  flags+=("--remap-path-prefix=$sysroot/lib/rustlib/src/rust=/rust")
  for arch in "${architectures[@]}"; do
    name=${arch}_unknown_linux_musl
    use_zig "$arch-unknown-linux-musl" "$arch-linux-musl"
    export "CARGO_TARGET_${name^^}_LINKER=rust-lld"
    targets+=(--target "$arch-unknown-linux-musl")
  done
  unset CFLAGS CPPFLAGS
  CARGO_ENCODED_RUSTFLAGS=$(IFS=$'\x1f' && echo "${flags[*]}") \
    CARGO_PROFILE_RELEASE_STRIP=symbols CARGO_PROFILE_RELEASE_DEBUG=false \
    cargo build --locked --release --bin sluicegate --target-dir target "${targets[@]}"
}

# Writes the files that all architectures share: manual pages, completions, licences, the SBOM, Debian's changelog.
describe() {
  local program command sysroot libc
  program=target/$(uname -m)-unknown-linux-musl/release/sluicegate
  mkdir -p "$work/man" "$work/completions" "$work/rules"
  "$program" man >"$work/man/sluicegate.1"
  for command in $("$program" --help | sed -n '/^Commands:/,/^$/s/^  \([a-z]*\) .*/\1/p'); do
    [ "$command" = help ] || "$program" man "$command" >"$work/man/sluicegate-$command.1"
  done
  "$program" completions bash >"$work/completions/sluicegate.bash"
  "$program" completions zsh >"$work/completions/_sluicegate"
  "$program" completions fish >"$work/completions/sluicegate.fish"
  cp LICENSE README.md CHANGELOG.md "$work"
  gzip -n9 <CHANGELOG.md >"$work/changelog.gz"
  cp deploy/examples/quickstart.yaml "$work/rules/example.yaml"
  sysroot=$(rustc --print sysroot)
  python3 deploy/dist/inventory.py licences "musl=$site/ziglang/lib/libc/musl/COPYRIGHT" \
    "Rust's standard library=$sysroot/share/doc/rust/COPYRIGHT-library.html" >"$work/THIRD-PARTY-LICENSES"
  libc=$sysroot/lib/rustlib/x86_64-unknown-linux-musl/lib/self-contained/libc.a
  python3 deploy/dist/inventory.py sbom "musl=$(grep -aoEm1 '1\.2\.[0-9]+' "$libc")" "rust=$RUSTUP_TOOLCHAIN" \
    >"$out/sluicegate-$version.cdx.json"
  printf 'sluicegate (%s-1) unstable; urgency=medium\n\n  * Release %s, described in changelog.gz.\n\n -- %s  %s\n' \
    "$version" "$version" "$(sed -n 's/^maintainer = "\(.*\)"/\1/p' Cargo.toml)" \
    "$(LC_ALL=C date -uRd "@$SOURCE_DATE_EPOCH")" >"$work/changelog"
}

# Packs the archive and the Debian package of an architecture.
package() {
  local target=$1-unknown-linux-musl name=sluicegate-$version-$1-unknown-linux-musl
  mkdir -p "$work/archives/$name"
  cp -r "$work"/{man,completions,rules,LICENSE,THIRD-PARTY-LICENSES,README.md,CHANGELOG.md} "$work/archives/$name"
  install -m 755 "target/$target/release/sluicegate" "$work/archives/$name"
  pack "$work/archives" "$name" | gzip -n9 >"$out/$name.tar.gz"
  "$tools/bin/cargo-deb" deb --quiet --no-build --no-strip --target "$target" --output "$out/" >/dev/null
}

# Packs a container image for all architectures with buildah, which needs no daemon.
image() {
  local arch root storage=("--root=$PWD/$work/storage" "--runroot=$PWD/$work/run" --storage-driver=vfs)
  for arch in "${architectures[@]}"; do
    root=target/dist-image/${debian[$arch]}
    mkdir -p "$root"/{bin,etc/ssl/certs,licenses}
    install -m 755 "target/$arch-unknown-linux-musl/release/sluicegate" "$root/bin"
    ln -s sluicegate "$root/bin/ratelimit"
    install -m 644 "$site/certifi/cacert.pem" "$root/etc/ssl/certs/ca-certificates.crt"
    install -m 644 "$work"/{LICENSE,THIRD-PARTY-LICENSES} "$root/licenses"
  done
  command -v buildah >/dev/null || { echo "no image: install buildah, or see docs/design/releases.md" && return; }
  for arch in "${architectures[@]}"; do
    buildah build "${storage[@]}" --quiet --isolation chroot --platform "linux/${debian[$arch]}" --target release \
      --identity-label=false --timestamp "$SOURCE_DATE_EPOCH" --manifest "sluicegate:$version" \
      --file deploy/container/Dockerfile . >/dev/null
  done
  buildah manifest push "${storage[@]}" --quiet --all "sluicegate:$version" "oci:$work/image:$version"
  pack "$work/image" . | gzip -n9 >"$out/sluicegate-$version-image.tar.gz"
}

# Fails if a file names a folder of this machine, or the registry that the crates came from.
check_paths() {
  local files=("$out"/*.json target/*-unknown-linux-musl/release/sluicegate) word
  for word in "$PWD" "${CARGO_HOME:-$HOME/.cargo}" "$tools" "$(rustc --print sysroot)" registry/src; do
    ! grep -alF "$word" "${files[@]}" || fail "these files contain $word"
  done
}

# Runs the program of each archive.
check_programs() {
  local arch name
  mkdir -p "$work/unpacked"
  for arch in "${architectures[@]}"; do
    name=sluicegate-$version-$arch-unknown-linux-musl
    tar --extract --gzip --file "$out/$name.tar.gz" --directory "$work/unpacked"
    # shellcheck disable=SC2046
    deploy/dist/check.sh "$work/unpacked/$name/sluicegate" $(emulator "$arch")
  done
}

version=$(cargo pkgid -p sluicegate | sed 's/.*[@#]//')
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}
rm -rf "$work" "$out" target/dist-image
mkdir -p "$work" "$out"
install_tools
compile
describe
for arch in "${architectures[@]}"; do
  package "$arch"
done
image
check_paths
check_programs
(cd "$out" && sha256sum -- * >SHA256SUMS && ls -l)
