//! Traces and metrics that are exported to a collector, which is part of the test.

use std::{
    io::{Read, Write},
    net::TcpListener,
    sync::{Arc, Mutex},
    thread,
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
    AggregationTemporality, HistogramDataPoint, exemplar::Value, metric::Data, number_data_point,
};
use prost::Message;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject};
use sluicegate_client::{Client, descriptor};
use sluicegate_proto::envoy::{
    extensions::common::ratelimit::v3::{RateLimitDescriptor, rate_limit_descriptor::Entry},
    service::ratelimit::v3::{RateLimitRequest, rate_limit_service_client::RateLimitServiceClient},
};
use tonic::{
    Request, Response, Status,
    transport::{Certificate, Endpoint, Identity, ServerTlsConfig, server::TcpIncoming},
};

use crate::support::{
    DEADLINE, Server,
    certificates::{Authority, Files},
    repository,
    server::command,
    wait_for, wait_for_async,
};

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
        let (collector, port) = Self::serve(tonic::transport::Server::builder());
        (collector, format!("http://127.0.0.1:{port}"))
    }

    /// Starts a collector with TLS that requires a client certificate. Returns its port.
    fn start_with_mutual_tls(authority: &Authority) -> (Self, u16) {
        let (certificate, key) = authority.sign();
        let tls = ServerTlsConfig::new()
            .identity(Identity::from_pem(certificate, key))
            .client_ca_root(Certificate::from_pem(&authority.pem));
        Self::serve(tonic::transport::Server::builder().tls_config(tls).unwrap())
    }

    fn serve(mut builder: tonic::transport::Server) -> (Self, u16) {
        let collector = Self::default();
        let incoming = TcpIncoming::bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let port = incoming.local_addr().unwrap().port();
        let server = builder
            .add_service(TraceServiceServer::new(collector.clone()))
            .add_service(MetricsServiceServer::new(collector.clone()));
        tokio::spawn(server.serve_with_incoming(incoming));
        (collector, port)
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
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let collected = thread::spawn(move || {
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
    read_from(stream)
}

fn read_from(stream: &mut impl Read) -> (String, Vec<u8>) {
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
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
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

/// The last export has the totals of what happened since the one before, with the attributes of the process.
#[tokio::test]
async fn metrics_are_exported_at_the_end() {
    let (collector, url) = Collector::start();
    let server = Server::builder()
        .set("telemetry.otlp.endpoint", &url)
        .set("telemetry.otlp.metrics", "true")
        .set("telemetry.otlp.interval", "1h")
        .set("telemetry.otlp.service_namespace", "shop")
        .env("OTEL_EXPORTER_OTLP_HEADERS", "api-key=a%20b")
        .start();
    send(&server, TRACEPARENT).await;
    server.signal("TERM");
    assert!(server.wait().await.success());

    let requests = collector.metrics.lock().unwrap();
    let [request] = requests.as_slice() else { panic!("{} exports", requests.len()) };
    let resource = &request.resource_metrics[0];
    let attributes = format!("{:?}", resource.resource.as_ref().unwrap().attributes);
    assert!(attributes.contains("\"shop\"") && attributes.contains("\"sluicegate\""), "{attributes}");
    let scope = &resource.scope_metrics[0];
    assert_eq!(scope.scope.as_ref().unwrap().name, "sluicegate");
    let data = |name| scope.metrics.iter().find(|metric| metric.name == name).and_then(|metric| metric.data.as_ref());
    let Some(Data::Sum(hits)) = data("ratelimit_service_rate_limit_total_hits") else { panic!("no hits") };
    assert!(hits.is_monotonic && hits.aggregation_temporality() == AggregationTemporality::Cumulative);
    assert_eq!(hits.data_points[0].value, Some(number_data_point::Value::AsInt(1)));
    let Some(Data::Sum(seconds)) = data("process_cpu_seconds_total") else { panic!("no CPU time") };
    let Some(number_data_point::Value::AsDouble(seconds)) = seconds.data_points[0].value else { panic!("no seconds") };
    assert!(seconds > 0.0 && seconds.fract() > 0.0, "{seconds}");
    let Some(Data::Gauge(_)) = data("process_threads") else { panic!("no threads") };
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

const TRACEPARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

/// Accepts one request over HTTPS, and returns its head and its body.
fn serve_https(authority: &Authority) -> (u16, thread::JoinHandle<(String, Vec<u8>)>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let (certificate, key) = authority.sign();
    let certificate = CertificateDer::from_pem_slice(certificate.as_bytes()).unwrap();
    let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap();
    let config = rustls::ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![certificate], key)
        .unwrap();
    let request = thread::spawn(move || {
        let (tcp, _) = listener.accept().unwrap();
        tcp.set_read_timeout(Some(DEADLINE)).unwrap();
        let connection = rustls::ServerConnection::new(Arc::new(config)).unwrap();
        let mut stream = rustls::StreamOwned::new(connection, tcp);
        let request = read_from(&mut stream);
        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").unwrap();
        request
    });
    (port, request)
}

fn gunzip(bytes: &[u8]) -> Vec<u8> {
    let mut decompressed = Vec::new();
    flate2::read::GzDecoder::new(bytes).read_to_end(&mut decompressed).unwrap();
    decompressed
}

/// The environment of a pod of envoyproxy/ratelimit that exports traces to a collector with a private certificate.
#[tokio::test]
async fn an_https_collector_is_configured_by_variables() {
    let (authority, files) = (Authority::new("collectors"), Files::new());
    let (port, request) = serve_https(&authority);
    let server = Server::builder()
        .store("memory")
        .rules(&repository("deploy/examples"))
        .args(["--compat", "envoyproxy"])
        .set("telemetry.log.level", "info")
        .set("http.debug_addr", "127.0.0.1:0")
        .env("USE_STATSD", "false")
        .env("TRACING_ENABLED", "true")
        .env("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", &format!("https://localhost:{port}/own/path"))
        .env("OTEL_EXPORTER_OTLP_CERTIFICATE", &files.write("ca.pem", &authority.pem))
        .env("OTEL_EXPORTER_OTLP_HEADERS", "x-general=1")
        .env("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "authorization=Bearer%20x")
        .env("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
        .env("OTEL_RESOURCE_ATTRIBUTES", "zone=eu%20west,service.name=not-this")
        .env("OTEL_SERVICE_NAME", "nor-this")
        .start();
    send(&server, TRACEPARENT).await;
    let log = server.log();
    let warnings: Vec<_> = log.lines().filter(|line| line.contains("without effect")).collect();
    assert!(warnings.len() == 1 && warnings[0].contains("OTEL_SERVICE_NAME (TRACING_SERVICE_NAME"), "{log}");
    server.signal("TERM");
    assert!(server.wait().await.success());
    let (head, body) = request.join().unwrap();
    assert!(head.starts_with("post /own/path ") && head.contains("authorization: bearer x"), "{head}");
    assert!(head.contains("content-encoding: gzip") && !head.contains("x-general"), "{head}");
    let request = ExportTraceServiceRequest::decode(gunzip(&body).as_slice()).unwrap();
    assert_eq!(spans(std::slice::from_ref(&request)).len(), 1);
    let resource = format!("{:?}", request.resource_spans[0].resource);
    assert!(resource.contains("\"eu west\"") && resource.contains("\"RateLimit\""), "{resource}");
    assert!(!resource.contains("this"), "{resource}");
}

/// Without the variables of envoyproxy/ratelimit, those of OpenTelemetry replace the defaults.
#[tokio::test]
async fn a_collector_can_require_a_client_certificate() {
    let (authority, files) = (Authority::new("collectors"), Files::new());
    let (collector, port) = Collector::start_with_mutual_tls(&authority);
    let (certificate, key) = authority.sign();
    let server = Server::builder()
        .set("telemetry.otlp.traces", "true")
        .set("telemetry.otlp.metrics", "true")
        .set("telemetry.otlp.interval", "1h")
        .env("OTEL_EXPORTER_OTLP_ENDPOINT", &format!("https://localhost:{port}"))
        .env("OTEL_EXPORTER_OTLP_CERTIFICATE", &files.write("ca.pem", &authority.pem))
        .env("OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE", &files.write("tls.pem", &certificate))
        .env("OTEL_EXPORTER_OTLP_CLIENT_KEY", &files.write("tls.key", &key))
        .env("OTEL_EXPORTER_OTLP_HEADERS", "api-key=a%20b")
        .env("OTEL_SERVICE_NAME", "shop")
        .start();
    send(&server, TRACEPARENT).await;
    server.signal("TERM");
    assert!(server.wait().await.success());
    let traces = collector.traces.lock().unwrap();
    assert_eq!(spans(&traces).len(), 1);
    let metrics = collector.metrics.lock().unwrap();
    assert_eq!(metrics.len(), 1);
    for resource in [&traces[0].resource_spans[0].resource, &metrics[0].resource_metrics[0].resource] {
        assert!(format!("{resource:?}").contains("\"shop\""), "{resource:?}");
    }
}

#[test]
fn invalid_certificates_end_the_start_with_the_name_of_the_setting() {
    let files = Files::new();
    let certificate = files.write("empty.pem", "");
    for protocol in ["grpc", "http"] {
        let output = command()
            .env("SLUICEGATE__TELEMETRY__OTLP__TRACES", "true")
            .env("SLUICEGATE__TELEMETRY__OTLP__PROTOCOL", protocol)
            .env("OTEL_EXPORTER_OTLP_ENDPOINT", "https://localhost:1")
            .env("OTEL_EXPORTER_OTLP_CERTIFICATE", &certificate)
            .output()
            .unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && error.contains("telemetry.otlp.tls.ca_file"), "{error}");
        assert!(error.contains("contains no certificate in PEM"), "{error}");
    }
}

#[tokio::test]
async fn nothing_is_exported_if_the_sdk_is_disabled() {
    let (collector, url) = Collector::start();
    for disabled in ["true", "false"] {
        let server = Server::builder()
            .set("telemetry.otlp.endpoint", &url)
            .set("telemetry.otlp.traces", "true")
            .set("telemetry.otlp.metrics", "true")
            .env("OTEL_EXPORTER_OTLP_HEADERS", "api-key=a%20b")
            .env("OTEL_SDK_DISABLED", disabled)
            .start();
        send(&server, TRACEPARENT).await;
        server.signal("TERM");
        assert!(server.wait().await.success());
        let is_empty = collector.traces.lock().unwrap().is_empty() && collector.metrics.lock().unwrap().is_empty();
        assert_eq!(is_empty, disabled == "true");
    }
}

/// A collector that is temporarily unavailable gets the spans later.
#[tokio::test]
async fn spans_are_sent_again_if_the_collector_is_unavailable() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let requests = thread::spawn(move || {
        let answer = |status: &str| {
            let (mut stream, _) = listener.accept().unwrap();
            let (_, body) = read_request(&mut stream);
            let response = format!("HTTP/1.1 {status}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
            stream.write_all(response.as_bytes()).unwrap();
            body
        };
        [answer("503 Service Unavailable"), answer("200 OK")]
    });
    let server = Server::builder()
        .set("telemetry.otlp.traces", "true")
        .env("OTEL_EXPORTER_OTLP_ENDPOINT", &url)
        .env("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
        .start();
    send(&server, TRACEPARENT).await;
    server.signal("TERM");
    assert!(server.wait().await.success());
    let [first, second] = requests.join().unwrap();
    assert_eq!(first, second);
    assert_eq!(spans(&[ExportTraceServiceRequest::decode(second.as_slice()).unwrap()]).len(), 1);
}

/// Messages over gRPC are compressed, too. A status in place of a response is logged.
#[tokio::test]
async fn messages_over_grpc_are_compressed_and_a_status_is_logged() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let received = Arc::new(Mutex::new(Vec::new()));
    let sink = Arc::clone(&received);
    tokio::spawn(async move {
        let (tcp, _) = listener.accept().await.unwrap();
        let mut connection = h2::server::handshake(tcp).await.unwrap();
        while let Some(Ok((request, mut respond))) = connection.accept().await {
            let sink = Arc::clone(&sink);
            tokio::spawn(async move {
                let encoding = request.headers()["grpc-encoding"].clone();
                let mut body = request.into_body();
                let mut message = Vec::new();
                while let Some(data) = body.data().await {
                    message.extend(data.unwrap());
                }
                sink.lock().unwrap().push((encoding, message));
                let response = http::Response::builder()
                    .header("content-type", "application/grpc")
                    .header("grpc-status", "7")
                    .header("grpc-message", "not%20permitted")
                    .body(())
                    .unwrap();
                respond.send_response(response, true).unwrap();
            });
        }
    });
    let server = Server::builder()
        .set("telemetry.otlp.endpoint", &url)
        .set("telemetry.otlp.metrics", "true")
        .set("telemetry.otlp.interval", "50ms")
        .set("telemetry.otlp.compression", "gzip")
        .start();
    wait_for_async("the log line", async || server.log().contains("not permitted").then_some(())).await;
    let (encoding, message) = received.lock().unwrap()[0].clone();
    assert_eq!((encoding, message[0]), (http::HeaderValue::from_static("gzip"), 1));
    let length = u32::from_be_bytes(message[1..5].try_into().unwrap());
    assert_eq!(length as usize, message.len() - 5);
    ExportMetricsServiceRequest::decode(gunzip(&message[5..]).as_slice()).unwrap();
}
