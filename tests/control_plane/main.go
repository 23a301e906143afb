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
	address = flag.String("address", "127.0.0.1:0", "where to listen")
	node    = flag.String("node", "default", "who gets snapshots")
	cert    = flag.String("cert", "", "certificate; without one there is no TLS")
	key     = flag.String("key", "", "its key")
	ca      = flag.String("ca", "", "who signs clients' certificates")
)

type snapshot struct {
	Version string
	Configs []string
	Files   []string
}

// read returns the resources of YAML files, and the same resources as JSON.
func read(files []string) (resources []types.Resource, all []json.RawMessage) {
	for _, file := range files {
		text, err := os.ReadFile(file)
		must(err)
		for _, document := range strings.Split(string(text), "\n---\n") {
			plain, err := yaml.YAMLToJSON([]byte(document))
			must(err)
			config := &ratelimit.RateLimitConfig{}
			must(protojson.UnmarshalOptions{DiscardUnknown: true}.Unmarshal(plain, config))
			resources, all = append(resources, config), append(all, plain)
		}
	}
	return resources, all
}

var output sync.Mutex

func tell(event map[string]any) {
	output.Lock()
	defer output.Unlock()
	must(json.NewEncoder(os.Stdout).Encode(event))
}

func must(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

func opened(ctx context.Context, _ int64, _ string) error {
	headers, _ := metadata.FromIncomingContext(ctx)
	tell(map[string]any{"event": "open", "headers": headers})
	return nil
}

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
		StreamOpenFunc:      opened,
		DeltaStreamOpenFunc: opened,
		StreamRequestFunc: func(_ int64, it *discovery.DiscoveryRequest) error {
			tell(map[string]any{
				"event": "request", "version": it.VersionInfo, "nonce": it.ResponseNonce, "node": it.Node.GetId(),
				"metadata": it.Node.GetMetadata().AsMap(), "type": it.TypeUrl, "names": it.ResourceNames,
				"error": it.ErrorDetail.GetMessage(),
			})
			return nil
		},
		StreamDeltaRequestFunc: func(_ int64, it *discovery.DeltaDiscoveryRequest) error {
			tell(map[string]any{
				"event": "request", "nonce": it.ResponseNonce, "node": it.Node.GetId(), "type": it.TypeUrl,
				"names": it.ResourceNamesSubscribe, "error": it.ErrorDetail.GetMessage(),
			})
			return nil
		},
	}
	listener, err := net.Listen("tcp", *address)
	must(err)
	service := grpc.NewServer(options()...)
	discovery.RegisterAggregatedDiscoveryServiceServer(service, server.NewServer(context.Background(), snapshots, callbacks))
	tell(map[string]any{"event": "listening", "address": listener.Addr().String()})
	go func() { must(service.Serve(listener)) }()

	lines := bufio.NewReader(os.Stdin)
	for {
		line, err := lines.ReadBytes('\n')
		if err == io.EOF {
			return
		}
		must(err)
		var wanted snapshot
		must(json.Unmarshal(line, &wanted))
		resources := []types.Resource{}
		for _, text := range wanted.Configs {
			encoded, err := hex.DecodeString(text)
			must(err)
			config := &ratelimit.RateLimitConfig{}
			must(proto.Unmarshal(encoded, config))
			resources = append(resources, config)
		}
		if len(wanted.Files) > 0 {
			read, all := read(wanted.Files)
			resources = append(resources, read...)
			tell(map[string]any{"event": "read", "version": wanted.Version, "configs": all})
		}
		state, err := cache.NewSnapshot(wanted.Version, map[resource.Type][]types.Resource{resource.RateLimitConfigType: resources})
		must(err)
		must(snapshots.SetSnapshot(context.Background(), *node, state))
	}
}
