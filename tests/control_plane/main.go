// A control plane for the tests, built on go-control-plane. It writes its address to the first line of standard output
// and then sends the snapshots that it reads from standard input.
//
// Each line of standard input is a snapshot: {"version": …, "configs": [encoded RateLimitConfig messages in hex]}. With
// "files", the snapshot consists of YAML files from Envoy Gateway's translator, which are also written to standard
// output as JSON (event "read"). All other lines of standard output are events of clients: {"event": "open" or
// "request", …}.
package main

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"flag"
	"io"
	"log"
	"net"
	"os"
	"strings"
	"sync"

	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"github.com/envoyproxy/go-control-plane/pkg/cache/types"
	"github.com/envoyproxy/go-control-plane/pkg/cache/v3"
	"github.com/envoyproxy/go-control-plane/pkg/resource/v3"
	"github.com/envoyproxy/go-control-plane/pkg/server/v3"
	ratelimit "github.com/envoyproxy/go-control-plane/ratelimit/config/ratelimit/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"sigs.k8s.io/yaml"
)

var (
	address = flag.String("address", "127.0.0.1:0", "listen address")
	node    = flag.String("node", "default", "id of the node that receives the snapshots")
	cert    = flag.String("cert", "", "server certificate (PEM file); empty: no TLS")
	key     = flag.String("key", "", "key of the server certificate (PEM file)")
	ca      = flag.String("ca", "", "CA of the client certificates (PEM file)")
)

type snapshot struct {
	Version string
	Configs []string
	Files   []string
}

// readFiles returns the resources of YAML files, and the same resources as JSON.
func readFiles(files []string) (resources []types.Resource, all []json.RawMessage) {
	for _, file := range files {
		text, err := os.ReadFile(file)
		must(err)
		for _, document := range strings.Split(string(text), "\n---\n") {
			asJSON, err := yaml.YAMLToJSON([]byte(document))
			must(err)
			config := &ratelimit.RateLimitConfig{}
			must(protojson.UnmarshalOptions{DiscardUnknown: true}.Unmarshal(asJSON, config))
			// Rule files have no name. Envoy Gateway gives a resource the name of its domain.
			if config.Name == "" {
				config.Name = config.Domain
			}
			resources, all = append(resources, config), append(all, asJSON)
		}
	}
	return resources, all
}

var output sync.Mutex

// writeEvent writes an event to standard output as one line of JSON.
func writeEvent(event map[string]any) {
	output.Lock()
	defer output.Unlock()
	must(json.NewEncoder(os.Stdout).Encode(event))
}

// must ends the process if there is an error.
func must(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

// streamOpened writes the event of a new stream, with the headers of the call.
func streamOpened(ctx context.Context, _ int64, _ string) error {
	headers, _ := metadata.FromIncomingContext(ctx)
	writeEvent(map[string]any{"event": "open", "headers": headers})
	return nil
}

// options returns the server options: TLS with client certificates, if -cert is set.
func options() []grpc.ServerOption {
	if *cert == "" {
		return nil
	}
	pem, err := os.ReadFile(*ca)
	must(err)
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(pem)
	config := &tls.Config{
		MinVersion: tls.VersionTLS13,
		ClientAuth: tls.RequireAndVerifyClientCert,
		ClientCAs:  pool,
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
			pair, err := tls.LoadX509KeyPair(*cert, *key)
			return &pair, err
		},
	}
	return []grpc.ServerOption{grpc.Creds(credentials.NewTLS(config))}
}

func main() {
	flag.Parse()
	snapshots := cache.NewSnapshotCache(false, cache.IDHash{}, nil)
	callbacks := server.CallbackFuncs{
		StreamOpenFunc:      streamOpened,
		DeltaStreamOpenFunc: streamOpened,
		StreamRequestFunc: func(_ int64, request *discovery.DiscoveryRequest) error {
			writeEvent(map[string]any{
				"event": "request", "version": request.VersionInfo, "nonce": request.ResponseNonce, "node": request.Node.GetId(),
				"metadata": request.Node.GetMetadata().AsMap(), "type": request.TypeUrl, "names": request.ResourceNames,
				"error": request.ErrorDetail.GetMessage(),
			})
			return nil
		},
		StreamDeltaRequestFunc: func(_ int64, request *discovery.DeltaDiscoveryRequest) error {
			writeEvent(map[string]any{
				"event": "request", "nonce": request.ResponseNonce, "node": request.Node.GetId(), "type": request.TypeUrl,
				"names": request.ResourceNamesSubscribe, "error": request.ErrorDetail.GetMessage(),
			})
			return nil
		},
	}
	listener, err := net.Listen("tcp", *address)
	must(err)
	service := grpc.NewServer(options()...)
	discovery.RegisterAggregatedDiscoveryServiceServer(service, server.NewServer(context.Background(), snapshots, callbacks))
	writeEvent(map[string]any{"event": "listening", "address": listener.Addr().String()})
	go func() { must(service.Serve(listener)) }()

	lines := bufio.NewReader(os.Stdin)
	for {
		line, err := lines.ReadBytes('\n')
		if err == io.EOF {
			return
		}
		must(err)
		var input snapshot
		must(json.Unmarshal(line, &input))
		resources := []types.Resource{}
		for _, text := range input.Configs {
			encoded, err := hex.DecodeString(text)
			must(err)
			config := &ratelimit.RateLimitConfig{}
			must(proto.Unmarshal(encoded, config))
			resources = append(resources, config)
		}
		if len(input.Files) > 0 {
			fromFiles, all := readFiles(input.Files)
			resources = append(resources, fromFiles...)
			writeEvent(map[string]any{"event": "read", "version": input.Version, "configs": all})
		}
		state, err := cache.NewSnapshot(input.Version, map[resource.Type][]types.Resource{resource.RateLimitConfigType: resources})
		must(err)
		must(snapshots.SetSnapshot(context.Background(), *node, state))
	}
}
