# `make help` lists the targets.
.PHONY: help run release test verify fix proto bench accuracy overload model fuzz attacks soak mutants profile book dist platforms fmt clippy doc \
  deny advisories

help: ## Print this list.
	@grep -E '^[a-z]+:.*##' Makefile | sed 's/:.*## /\t/'

run: ## Run a quick development build with counters in memory and the example rules.
	cargo run

release: ## Build the production binary, target/release/sluicegate (fat LTO; 6 minutes on two cores).
	cargo build --release

dist: platforms ## Build the files of a release in target/dist: binaries, packages, image, SBOM (20 to 40 minutes on two cores).
	deploy/dist/build.sh

platforms: ## Check that service and client compile for macOS and Windows (needs rustup; 5 minutes on two cores).
	deploy/dist/platforms.sh

test: ## Install the tools that the tests need, or name the missing ones, and run all tests.
	tests/setup.sh
	cargo test --workspace --all-features

verify: fmt clippy doc test ## Run all checks of CI. Changes no files.

fix: ## Apply automatic fixes: format and clippy suggestions.
	cargo fmt
	cargo clippy --workspace --all-targets --all-features --fix --allow-dirty --allow-staged

proto: ## Regenerate proto/src/gen from the .proto files.
	UPDATE_GENERATED=1 cargo test -p sluicegate-proto

bench: ## Measure the cost of a decision relative to a server that decides nothing (needs h2load, redis-server and memcached).
	cargo bench --bench decisions

profile: release ## Print where the instructions and the time of a decision are spent (needs h2load, valgrind, perf, redis-server).
	python3 benches/profile.py

accuracy: ## Measure the error of each algorithm against an exact log; writes plots into docs/accuracy.
	cargo bench --bench accuracy

overload: ## Simulate adaptive limits and load shedding in virtual time; writes plots into docs/overload.
	cargo bench --bench overload

model: ## Search the states of the protocols that hand something out once, more deeply than the tests do (half an hour).
	LARGE_MODELS=1 cargo test --workspace --lib model:: -- --nocapture

SECONDS ?= 60
fuzz: ## Run each fuzz target for a minute, or SECONDS=n (needs cargo-fuzz).
	fuzz/run.py --seconds $(SECONDS)

attacks: release ## Measure the latencies of calls and health checks while all attacks of the tests run.
	SLUICEGATE_BINARY=$(CURDIR)/target/release/sluicegate \
	  cargo test --test integration -- --ignored --nocapture latencies_during_all_attacks

HOURS ?= 1
SEED ?= 1
soak: release ## Run all features under faults for HOURS=1 with SEED=1, and write a report into docs/endurance.
	tests/setup.sh
	SLUICEGATE_BINARY=$(CURDIR)/target/release/sluicegate HOURS=$(HOURS) SEED=$(SEED) \
	  cargo test --test endurance -- --nocapture no_law_is_violated_under_faults

mutants: ## Run all mutation tests (needs cargo-mutants; takes days).
	tests/setup.sh
	cargo mutants --config mutants.toml

fmt:
	cargo fmt --all --check

clippy:
	cargo clippy --workspace --all-targets --all-features -- -D warnings

doc:
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --all-features --no-deps

book: ## Build docs/ as a book in target/book (tests/setup.sh installs mdBook).
	tests/setup.sh
	target/test-tools/bin/mdbook build

deny: ## Check licences, sources and duplicates of dependencies (needs cargo-deny).
	cargo deny check bans licenses sources

advisories: ## Check dependencies against the RustSec database (needs cargo-deny and access to github.com).
	cargo deny check advisories
