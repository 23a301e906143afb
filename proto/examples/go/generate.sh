#!/usr/bin/env bash
# Generates the Go code of sluicegate.v1 into ./decisions. Needs Go and protoc; Envoy's types are those of go-control-plane.
set -euo pipefail
cd "$(dirname "$0")"
protos=../../proto
envoy=github.com/envoyproxy/go-control-plane/envoy
export GOBIN="$PWD/bin"
go install google.golang.org/protobuf/cmd/protoc-gen-go@v1.36.10
go install google.golang.org/grpc/cmd/protoc-gen-go-grpc@v1.5.1
mkdir -p decisions
map="Msluicegate/v1/decisions.proto=sluicegate.example/stream/decisions"
for file in config/core/v3/base extensions/common/ratelimit/v3/ratelimit service/ratelimit/v3/rls type/v3/ratelimit_unit; do
  map="$map,Menvoy/$file.proto=$envoy/$(dirname "$file")"
done
PATH="$GOBIN:$PATH" ${PROTOC:-protoc} -I"$protos" \
  --go_out=. --go_opt="module=sluicegate.example/stream,$map" \
  --go-grpc_out=. --go-grpc_opt="module=sluicegate.example/stream,$map" \
  sluicegate/v1/decisions.proto
go mod tidy
