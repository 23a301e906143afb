//! Traces and metrics that are exported to a collector, which is part of the test.

use std::{
    io::{Read, Write},
    sync::{Arc, Mutex},
};

use opentelemetry_proto::tonic::collector::{
    metrics::v1::{
        ExportMetricsServiceRequest, ExportMetricsServiceResponse,
        metrics_service_server::{MetricsService, MetricsServiceServer},
    },
    trace::v1::{
        ExportTraceServiceRequest, ExportTraceServiceResponse,
        trace_service_server::{TraceService, TraceServiceServer},
    },
};
use opentelemetry_proto::tonic::metrics::v1::{
    AggregationTemporality, HistogramDataPoint, exemplar::Value, metric::Data,
};
use prost::Message;
use sluicegate_client::{Client, descriptor};
use sluicegate_proto::envoy::{
    extensions::common::ratelimit::v3::{RateLimitDescriptor, rate_limit_descriptor::Entry},
    service::ratelimit::v3::{RateLimitRequest, rate_limit_service_client::RateLimitServiceClient},
};
use tonic::{
    Request, Response, Status,
    transport::{Endpoint, server::TcpIncoming},
};

use crate::support::{DEADLINE, Server, wait_for, wait_for_async};

/// An OpenTelemetry collector that stores all requests.
#[derive(Clone, Default)]
struct Collector {
    traces: Arc<Mutex<Vec<ExportTraceServiceRequest>>>,
    metrics: Arc<Mutex<Vec<ExportMetricsServiceRequest>>>,
}

#[tonic::async_trait]
impl TraceService for Collector {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        self.traces.lock().unwrap().push(request.into_inner());
        Ok(Response::new(Default::default()))
    }
}

#[tonic::async_trait]
impl MetricsService for Collector {
    async fn export(
        &self,
        request: Request<ExportMetricsServiceRequest>,
    ) -> Result<Response<ExportMetricsServiceResponse>, Status> {
        assert_eq!(request.metadata().get("api-key").unwrap(), "a b");
        self.metrics.lock().unwrap().push(request.into_inner());
        Ok(Response::new(Default::default()))
    }
}

impl Collector {
    fn start() -> (Self, String) {
        let collector = Self::default();
        let incoming = TcpIncoming::bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let url = format!("http://{}", incoming.local_addr().unwrap());
        let server = tonic::transport::Server::builder()
            .add_service(TraceServiceServer::new(collector.clone()))
            .add_service(MetricsServiceServer::new(collector.clone()));
        tokio::spawn(server.serve_with_incoming(incoming));
        (collector, url)
    }
}

/// Sends a request with this trace context of W3C.
async fn send(server: &Server, traceparent: &str) {
    send_with(server, &[("traceparent", traceparent)]).await;
}

/// Sends a request with these headers.
async fn send_with(server: &Server, headers: &[(&'static str, &str)]) {
    let channel = Endpoint::from_shared(format!("http://{}", server.grpc)).unwrap().connect().await.unwrap();
    let entry = Entry { key: "user".into(), value: "carol".into() };
    let descriptor = RateLimitDescriptor { entries: vec![entry], ..RateLimitDescriptor::default() };
    let message = RateLimitRequest { domain: "example".into(), descriptors: vec![descriptor], hits_addend: 0 };
    let mut request = Request::new(message);
    for (name, value) in headers {
        request.metadata_mut().insert(*name, value.parse().unwrap());
    }
    RateLimitServiceClient::new(channel).should_rate_limit(request).await.unwrap();
}

#[tokio::test]
async fn a_callers_sampled_trace_is_continued() {
    let (collector, url) = Collector::start();
    let server = Server::builder()
        .set("telemetry.otlp.endpoint", &url)
        .set("telemetry.otlp.traces", "true")
        .set("telemetry.otlp.sample_ratio", "0")
        .start();
    send(&server, "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01").await;
    send(&server, "00-ffffffffffffffffffffffffffffffff-b7ad6b7169203331-00").await;
    // Remaining spans are sent during the shutdown.
    server.signal("TERM");
    assert!(server.wait().await.success());
    let requests = collector.traces.lock().unwrap();
    let spans = spans(&requests);
    assert_eq!(spans.len(), 1, "{spans:#?}");
    assert_eq!(spans[0].name, "ShouldRateLimit");
    assert_eq!(spans[0].trace_id, 0x0af7_6519_16cd_43dd_8448_eb21_1c80_319c_u128.to_be_bytes());
    assert_eq!(spans[0].parent_span_id, 0xb7ad_6b71_6920_3331_u64.to_be_bytes());
    let attributes = format!("{:?}", spans[0].attributes);
    assert!(attributes.contains("\"example\"") && attributes.contains("\"ok\""), "{attributes}");
    let keys: Vec<_> = spans[0].attributes.iter().map(|attribute| attribute.key.as_str()).collect();
    assert_eq!(keys, ["domain", "outcome"]);
    assert!(!format!("{requests:?}").contains("carol"), "no export contains the value of an entry: {requests:?}");
}

/// A trace is also continued by B3 headers, with their sampling decision. Malformed headers fail no request.
#[tokio::test]
async fn a_callers_trace_in_headers_of_b3_is_continued() {
    let (collector, url) = Collector::start();
    let server = Server::builder()
        .set("telemetry.otlp.endpoint", &url)
        .set("telemetry.otlp.traces", "true")
        .set("telemetry.otlp.sample_ratio", "0")
        .start();
    let (trace_id, span_id) = ("x-b3-traceid", "x-b3-spanid");
    let w3c = ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01");
    for sampled in [
        &[("b3", "0000000000000000000000000000000a-000000000000000a-1"), w3c][..],
        &[("b3", "000000000000000b-000000000000000b-d")],
        &[(trace_id, "000000000000000c"), (span_id, "000000000000000c"), ("x-b3-sampled", "1")],
        &[(trace_id, "000000000000000d"), (span_id, "000000000000000d"), ("x-b3-flags", "1")],
    ] {
        send_with(&server, sampled).await;
    }
    for not_sampled in [
        &[("b3", "000000000000000e-000000000000000e-0"), w3c][..],
        &[("b3", "0")],
        &[(trace_id, "000000000000000e"), (span_id, "000000000000000e"), ("x-b3-sampled", "0"), w3c],
        &[("b3", "-------"), ("x-b3-flags", "?"), (trace_id, "x")],
    ] {
        send_with(&server, not_sampled).await;
    }
    let baggage = ("baggage", "user=carol");
    send_with(&server, &[("b3", "000000000000000f-000000000000000f-1"), baggage]).await;
    server.signal("TERM");
    assert!(server.wait().await.success());
    let requests = collector.traces.lock().unwrap();
    let spans = spans(&requests);
    let ids: Vec<_> = spans.iter().map(|span| (span.trace_id[15], span.parent_span_id[7])).collect();
    assert_eq!(ids, [0xa, 0xb, 0xc, 0xd, 0xf].map(|id| (id, id)));
    assert!(!format!("{requests:?}").contains("carol"), "no export contains baggage: {requests:?}");
}

/// Returns the spans of the requests to a collector.
fn spans(requests: &[ExportTraceServiceRequest]) -> Vec<&opentelemetry_proto::tonic::trace::v1::Span> {
    let resources = requests.iter().flat_map(|request| &request.resource_spans);
    resources.flat_map(|resource| &resource.scope_spans).flat_map(|scope| &scope.spans).collect()
}

/// Traces and metrics are exported over HTTP, with a configured service name.
#[tokio::test]
async fn traces_and_metrics_are_exported_over_http() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let collected = std::thread::spawn(move || {
        let collect = |_| {
            let (mut stream, _) = listener.accept().unwrap();
            let (head, body) = read_request(&mut stream);
            stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").unwrap();
            (head, body)
        };
        [0, 1].map(collect)
    });
    let server = Server::builder()
        .set("telemetry.otlp.endpoint", &url)
        .set("telemetry.otlp.protocol", "http")
        .set("telemetry.otlp.traces", "true")
        .set("telemetry.otlp.metrics", "true")
        .set("telemetry.otlp.interval", "1h")
        .set("telemetry.otlp.service_name", "envoy-ratelimit")
        .set("telemetry.otlp.service_instance_id", "pod-7")
        .env("OTEL_EXPORTER_OTLP_HEADERS", "api-key=a%20b")
        .start();
    send(&server, "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01").await;
    // Remaining spans and metrics are sent during the shutdown.
    server.signal("TERM");
    assert!(server.wait().await.success());
    let collected = collected.join().unwrap();
    for (head, _) in &collected {
        assert!(head.contains("application/x-protobuf") && head.contains("api-key: a b"), "{head}");
    }
    let sent_to = |path: &str| collected.iter().find(|(head, _)| head.starts_with(&format!("post {path} "))).unwrap();
    let metrics = ExportMetricsServiceRequest::decode(sent_to("/v1/metrics").1.as_slice()).unwrap();
    let point = latency(&[metrics]).unwrap();
    let exemplar = &point.exemplars[0];
    assert_eq!(exemplar.trace_id, 0x0af7_6519_16cd_43dd_8448_eb21_1c80_319c_u128.to_be_bytes());
    assert!((point.start_time_unix_nano..point.time_unix_nano).contains(&exemplar.time_unix_nano), "{point:?}");
    assert!(matches!(exemplar.value, Some(Value::AsDouble(seconds)) if seconds > 0.0), "{exemplar:?}");
    let request = ExportTraceServiceRequest::decode(sent_to("/v1/traces").1.as_slice()).unwrap();
    let resource = format!("{:?}", request.resource_spans[0].resource);
    assert!(resource.contains("\"envoy-ratelimit\"") && resource.contains("\"pod-7\""), "{resource}");
}

/// Reads one HTTP request and returns its head in lower case, and its body.
fn read_request(stream: &mut std::net::TcpStream) -> (String, Vec<u8>) {
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        stream.read_exact(&mut byte).unwrap();
        head.push(byte[0]);
    }
    let head = String::from_utf8(head).unwrap().to_lowercase();
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")).unwrap();
    let mut body = vec![0; length.parse().unwrap()];
    stream.read_exact(&mut body).unwrap();
    (head, body)
}

#[test]
fn a_collector_that_rejects_metrics_is_logged() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let server = Server::builder()
        .set("telemetry.otlp.endpoint", &format!("http://{}", listener.local_addr().unwrap()))
        .set("telemetry.otlp.protocol", "http")
        .set("telemetry.otlp.metrics", "true")
        .set("telemetry.otlp.interval", "50ms")
        .start();
    let (mut stream, _) = listener.accept().unwrap();
    read_request(&mut stream);
    stream.write_all(b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\nconnection: close\r\n\r\n").unwrap();
    wait_for("a log line", || server.log().contains("cannot send metrics to the OpenTelemetry").then_some(()));
    assert!(server.log().contains("503"), "{}", server.log());
}

/// A check in a frame has its own span, in the trace of its caller.
#[tokio::test]
async fn a_check_on_a_stream_continues_its_trace() {
    let (collector, url) = Collector::start();
    let server = Server::builder()
        .set("telemetry.otlp.endpoint", &url)
        .set("telemetry.otlp.traces", "true")
        .set("telemetry.otlp.sample_ratio", "0")
        .start();
    for batching in [true, false] {
        let limiter = Client::builder(format!("http://{}", server.grpc)).domain("example").timeout(DEADLINE);
        let limiter = limiter.batching(batching).connect_lazy().unwrap();
        let check = || limiter.check([descriptor! { "user" => "alice" }]);
        check().without_fallback().await.unwrap();
        check()
            .traceparent("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
            .without_fallback()
            .await
            .unwrap();
        check()
            .traceparent("00-0af7651916cd43dd8448eb211c80319d-b7ad6b7169203331-00")
            .without_fallback()
            .await
            .unwrap();
    }
    server.signal("TERM");
    assert!(server.wait().await.success());
    let requests = collector.traces.lock().unwrap();
    let spans = spans(&requests);
    assert_eq!(spans.len(), 2, "{spans:#?}");
    for span in spans {
        assert_eq!(span.trace_id, 0x0af7_6519_16cd_43dd_8448_eb21_1c80_319c_u128.to_be_bytes());
        assert_eq!(span.parent_span_id, 0xb7ad_6b71_6920_3331_u64.to_be_bytes());
    }
}

#[tokio::test]
async fn metrics_are_exported_if_configured() {
    let (collector, url) = Collector::start();
    let server = Server::builder()
        .set("telemetry.otlp.endpoint", &url)
        .set("telemetry.otlp.metrics", "true")
        .set("telemetry.otlp.interval", "50ms")
        .env("OTEL_EXPORTER_OTLP_HEADERS", "api-key=a%20b")
        .start();
    send(&server, "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01").await;
    wait_for_async("the hit to be reported", async || {
        let names = format!("{:?}", collector.metrics.lock().unwrap());
        names.contains("ratelimit_service_rate_limit_total_hits").then_some(())
    })
    .await;
    let point = wait_for_async("the response time", async || latency(&collector.metrics.lock().unwrap())).await;
    assert_eq!((point.count, point.bucket_counts.iter().sum(), point.bucket_counts.len()), (1, 1_u64, 17));
    assert_eq!((point.explicit_bounds.len(), point.explicit_bounds[0]), (16, 1e-6));
    assert!(point.sum() > 0.0 && point.time_unix_nano > point.start_time_unix_nano && point.start_time_unix_nano > 0);
    assert!(format!("{:?}", point.attributes[0]).contains("ShouldRateLimit"), "{:?}", point.attributes);
    assert!(point.exemplars.is_empty(), "{:?}", point.exemplars);
    let names = format!("{:?}", collector.metrics.lock().unwrap());
    assert!(names.contains("\"sluicegate_decision_seconds\""), "{names}");
}

/// Failures to export are logged.
#[tokio::test]
async fn an_unavailable_collector_is_logged() {
    for protocol in ["grpc", "http"] {
        let server = Server::builder()
            .set("telemetry.otlp.endpoint", "http://127.0.0.1:1")
            .set("telemetry.otlp.protocol", protocol)
            .set("telemetry.otlp.metrics", "true")
            .set("telemetry.otlp.interval", "50ms")
            .start();
        wait_for_async("the log line", async || {
            server.log().contains("cannot send metrics to the OpenTelemetry collector").then_some(())
        })
        .await;
    }
}

/// Returns the data point of the response time, or `None` if there has been no request.
fn latency(requests: &[ExportMetricsServiceRequest]) -> Option<HistogramDataPoint> {
    let resources = requests.iter().flat_map(|request| &request.resource_metrics);
    let metrics = resources.flat_map(|resource| &resource.scope_metrics).flat_map(|scope| &scope.metrics);
    let mut points = metrics.filter_map(|metric| match &metric.data {
        Some(Data::Histogram(histogram)) if metric.name == "ratelimit_service_response_time_seconds" => {
            assert_eq!((histogram.aggregation_temporality(), &*metric.unit), (AggregationTemporality::Cumulative, "s"));
            histogram.data_points.first()
        }
        _ => None,
    });
    points.rfind(|point| point.count > 0).cloned()
}
