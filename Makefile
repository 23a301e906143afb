# `make help` lists what there is.
.PHONY: help run test verify fix proto bench accuracy overload mutants fmt clippy doc deny

help: ## This list.
	@grep -E '^[a-z]+:.*##' Makefile | sed 's/:.*## /\t/'

run: ## The service on its embedded defaults: memory, example rules.
	cargo run --release

test: ## Install what the tests use (or say what is missing), and run them all.
	tests/setup.sh
	cargo test --workspace --all-features

verify: fmt clippy doc test ## All that CI checks; writes nothing.

fix: ## What can be put right by a program.
	cargo fmt
	cargo clippy --workspace --all-targets --all-features --fix --allow-dirty --allow-staged

proto: ## Generate the code in proto/src/gen anew from the .proto files.
	UPDATE_GENERATED=1 cargo test -p sluicegate-proto

bench: ## What a decision costs, beside a server that decides nothing (needs h2load and redis-server).
	cargo bench --bench decisions

accuracy: ## How far each algorithm is from the exact log: tables, and plots in docs/accuracy.
	cargo bench --bench accuracy

overload: ## Limits that follow latency, and shedding, in virtual time: tables, and plots in docs/overload.
	cargo bench --bench overload

mutants: ## Breaks the code on purpose, line by line, and says what no test noticed (needs cargo-mutants; hours).
	tests/setup.sh
	cargo mutants --config mutants.toml

fmt:
	cargo fmt --all --check

clippy:
	cargo clippy --workspace --all-targets --all-features -- -D warnings

doc:
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --all-features --no-deps

deny: ## Licences, sources and duplicates of the dependencies (needs cargo-deny).
	cargo deny check bans licenses sources
