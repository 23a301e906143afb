// Sends several checks on one stream.
//
//	./generate.sh
//	go run . 127.0.0.1:8081
package main

import (
	"context"
	"fmt"
	"log"
	"os"

	common "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	ratelimit "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"sluicegate.example/stream/decisions"
)

func main() {
	connection, err := grpc.NewClient(os.Args[1], grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		log.Fatal(err)
	}
	defer connection.Close()
	stream, err := decisions.NewDecisionServiceClient(connection).Stream(context.Background())
	if err != nil {
		log.Fatal(err)
	}

	frame := &decisions.CheckFrame{}
	for id := range uint64(5) {
		entries := []*common.RateLimitDescriptor_Entry{{Key: "user", Value: "stream"}}
		request := &ratelimit.RateLimitRequest{
			Domain:      "example",
			Descriptors: []*common.RateLimitDescriptor{{Entries: entries}},
		}
		frame.Checks = append(frame.Checks, &decisions.Check{Id: id, Request: request})
	}
	if err := stream.Send(frame); err != nil {
		log.Fatal(err)
	}
	if err := stream.CloseSend(); err != nil {
		log.Fatal(err)
	}

	for waiting := len(frame.Checks); waiting > 0; {
		frame, err := stream.Recv()
		if err != nil {
			log.Fatal(err)
		}
		for _, response := range frame.Responses {
			waiting--
			if failed := response.GetError(); failed != nil {
				fmt.Printf("%d: %s\n", response.Id, failed.Message)
				continue
			}
			verdict := response.GetVerdict()
			status := verdict.Statuses[0]
			if verdict.Allowed {
				fmt.Printf("%d: allowed, %d remaining\n", response.Id, status.Remaining)
			} else {
				fmt.Printf("%d: denied, retry after %.1f s\n", response.Id, float64(status.GetRetryAfterUs())/1e6)
			}
		}
	}
}
