//! Every port without credentials, with invalid ones, and with each role. The methods of the admin API are read from its
//! descriptor, so a new method needs no change here.

use std::fs;

use prost_reflect::{DescriptorPool, MethodDescriptor, ServiceDescriptor};
use sluicegate_proto::{
    FILE_DESCRIPTOR_SET,
    sluicegate::cluster::v1::{PullRequest, cluster_service_client::ClusterServiceClient},
};
use tonic::{
    Code, Request,
    client::Grpc,
    transport::{Channel, Endpoint},
};
use tonic_prost::ProstCodec;

use crate::support::{
    Operator, Server,
    operator::{OPERATE, READ},
    repository, request_for, rules,
    server::{agent, get},
};

const SERVICE: &str = "sluicegate.admin.v1.AdminService";
const RULES: &str = "domain: api\ndescriptors:\n- key: user\n  rate_limit: { unit: year, requests_per_unit: 2 }\n";
/// Methods whose names begin with these words change nothing. All others require the role `operate`.
const READING: [&str; 7] = ["Find", "Get", "List", "Read", "Watch", "Inspect", "Simulate"];
const WRONG: &str = "operate-0123456789abcdeg";

fn service() -> ServiceDescriptor {
    DescriptorPool::decode(FILE_DESCRIPTOR_SET).unwrap().get_service_by_name(SERVICE).unwrap()
}

fn is_reading(method: &MethodDescriptor) -> bool {
    READING.iter().any(|word| method.name().starts_with(word))
}

/// Returns whether the comment above a method permits it for callers without a token.
fn is_public(method: &MethodDescriptor) -> bool {
    let proto = fs::read_to_string(repository("proto/proto/sluicegate/admin/v1/admin.proto")).unwrap();
    let before = proto.split_once(&format!("  rpc {}(", method.name())).unwrap().0;
    before.lines().rev().take_while(|line| line.starts_with("  //")).any(|line| line.contains("role `public`"))
}

/// A caller of the admin API.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Caller {
    /// With an unknown token, or on the admin listener without one.
    Unknown,
    /// Without a token, on the HTTP listener, from another host.
    Elsewhere,
    Reader,
    Operator,
}

impl Caller {
    /// Returns the required result: whether a method that is called without any field authenticates and authorizes the
    /// caller. Its fields are checked later.
    fn expected(self, method: &MethodDescriptor) -> Code {
        let is_permitted = match self {
            Self::Unknown => return Code::Unauthenticated,
            Self::Elsewhere => is_public(method),
            Self::Reader => is_reading(method),
            Self::Operator => true,
        };
        if is_permitted { Code::Ok } else { Code::PermissionDenied }
    }
}

/// Calls a method by gRPC with an empty message, and returns `Ok` for each error that does not concern the caller.
async fn call(channel: &Channel, method: &MethodDescriptor, authorization: Option<&str>) -> Code {
    let mut client = Grpc::new(channel.clone());
    client.ready().await.unwrap();
    let path = format!("/{SERVICE}/{}", method.name()).parse().unwrap();
    let mut request = Request::new(());
    if let Some(authorization) = authorization {
        request.metadata_mut().insert("authorization", authorization.parse().unwrap());
    }
    let codec = ProstCodec::<(), ()>::default();
    let status = if method.is_server_streaming() {
        client.server_streaming(request, path, codec).await.err()
    } else {
        client.unary(request, path, codec).await.err()
    };
    match status.map_or(Code::Ok, |status| status.code()) {
        refused @ (Code::Unauthenticated | Code::PermissionDenied | Code::Unimplemented) => refused,
        _ => Code::Ok,
    }
}

/// Calls a method as JSON with an empty message.
fn call_json(base: &str, method: &MethodDescriptor, headers: &[(&str, &str)]) -> Code {
    let request = agent().post(format!("{base}/v1/{}", method.name()));
    let request = headers.iter().fold(request, |request, (name, value)| request.header(*name, *value));
    match request.send("{}").unwrap().status().as_u16() {
        401 => Code::Unauthenticated,
        403 => Code::PermissionDenied,
        501 => Code::Unimplemented,
        _ => Code::Ok,
    }
}

/// Calls a method at its path for gRPC with another content type over HTTP/1.1, which no gRPC client does.
fn call_without_grpc(base: &str, method: &MethodDescriptor, authorization: Option<&str>) -> Code {
    let mut request = agent().post(format!("{base}/{SERVICE}/{}", method.name()));
    request = request.header("content-type", "application/json");
    if let Some(authorization) = authorization {
        request = request.header("authorization", authorization);
    }
    match request.send(&b"\0\0\0\0\0"[..]).unwrap().status().as_u16() {
        401 => Code::Unauthenticated,
        403 => Code::PermissionDenied,
        501 => Code::Unimplemented,
        _ => Code::Ok,
    }
}

#[tokio::test]
async fn every_admin_method_checks_the_caller_on_every_listener() {
    let folder = rules(&[("api.yaml", RULES)]);
    let operator = Operator::start(folder.path(), "memory");
    let channel = Endpoint::from_shared(operator.addr.clone()).unwrap().connect().await.unwrap();
    let http = operator.server.url("");
    let [wrong, read, operate] = [WRONG, READ, OPERATE].map(|token| format!("Bearer {token}"));
    let basic = format!("Basic {OPERATE}");
    let on_admin_listener = [
        (None, Caller::Unknown),
        (Some("Bearer "), Caller::Unknown),
        (Some(OPERATE), Caller::Unknown),
        (Some(basic.as_str()), Caller::Unknown),
        (Some(wrong.as_str()), Caller::Unknown),
        (Some(read.as_str()), Caller::Reader),
        (Some(operate.as_str()), Caller::Operator),
    ];
    let elsewhere = ("x-forwarded-for", "192.0.2.1");
    let on_http_listener = [
        (vec![elsewhere], Caller::Elsewhere),
        (vec![elsewhere, ("authorization", &wrong)], Caller::Unknown),
        (vec![("authorization", wrong.as_str())], Caller::Unknown),
        (vec![elsewhere, ("authorization", &read)], Caller::Reader),
        // A caller on the same host has the role `read`.
        (vec![], Caller::Reader),
        (vec![elsewhere, ("authorization", &operate)], Caller::Operator),
    ];
    let service = service();
    assert!(service.methods().len() >= 21);
    for method in service.methods() {
        let name = method.name();
        for (authorization, caller) in on_admin_listener {
            let expected = caller.expected(&method);
            assert_eq!(call(&channel, &method, authorization).await, expected, "gRPC {name} {authorization:?}");
            let result = call_without_grpc(&operator.addr, &method, authorization);
            assert_eq!(result, expected, "gRPC as JSON {name} {authorization:?}");
            let headers: Vec<_> = authorization.map(|value| ("authorization", value)).into_iter().collect();
            let result = call_json(&operator.addr, &method, &headers);
            assert_eq!(result, expected, "JSON {name} {authorization:?}");
        }
        for (headers, caller) in &on_http_listener {
            let result = call_json(&http, &method, headers);
            assert_eq!(result, caller.expected(&method), "HTTP {name} {headers:?}");
        }
    }
}

/// Each listener has its own services only, for all callers.
#[tokio::test]
async fn no_listener_serves_the_methods_of_another() {
    let folder = rules(&[("api.yaml", RULES)]);
    let operator = Operator::start(folder.path(), "memory");
    let server = &operator.server;
    let connect = async |address: String| Endpoint::from_shared(address).unwrap().connect().await.unwrap();
    let (grpc, admin) = (connect(format!("http://{}", server.grpc)).await, connect(operator.addr.clone()).await);
    let operate = format!("Bearer {OPERATE}");
    for method in service().methods() {
        assert_eq!(call(&grpc, &method, Some(&operate)).await, Code::Unimplemented, "{}", method.name());
        // The HTTP listener has the methods as JSON only.
        let request = agent().post(server.url(&format!("/{SERVICE}/{}", method.name())));
        let request = request.header("content-type", "application/grpc").header("authorization", &operate);
        assert_eq!(request.send(&b"\0\0\0\0\0"[..]).unwrap().status().as_u16(), 404, "{}", method.name());
    }
    for channel in [&grpc, &admin] {
        let mut request = Request::new(PullRequest::default());
        request.metadata_mut().insert("authorization", operate.parse().unwrap());
        let status = ClusterServiceClient::new(channel.clone()).pull(request).await.unwrap_err();
        assert_eq!(status.code(), Code::Unimplemented, "calls of peers");
    }
    // Without the admin API, all methods that change the service are rejected.
    let server = Server::start(folder.path(), "memory");
    for method in service().methods().filter(|method| !is_reading(method)) {
        assert_eq!(call_json(&server.url(""), &method, &[]), Code::PermissionDenied, "{}", method.name());
        let authorization = [("authorization", operate.as_str())];
        assert_eq!(call_json(&server.url(""), &method, &authorization), Code::Unauthenticated, "{}", method.name());
    }
}

/// The additional HTTP listeners have their pages, for reading only.
#[tokio::test]
async fn debug_and_metrics_listeners_serve_only_their_pages() {
    const PATHS: [&str; 11] = [
        "/",
        "/rlconfig",
        "/stats",
        "/metrics",
        "/json",
        "/healthcheck",
        "/readyz",
        "/resources/db",
        "/v1/GetSession",
        "/openapi.json",
        "/console/app.js",
    ];
    let folder = rules(&[("api.yaml", RULES)]);
    let server = Server::builder().rules(folder.path()).set("http.debug_addr", "127.0.0.1:0");
    let server = server.set("http.metrics_addr", "127.0.0.1:0").start();
    let client = server.client().await;
    client.check(request_for("api", &[("user", "bob")])).await.unwrap();
    let log = server.log();
    let serving: serde_json::Value = log
        .lines()
        .filter_map(|line| serde_json::from_str(line).ok())
        .find(|line: &serde_json::Value| line["message"] == "serving")
        .unwrap();
    let others = serving["others"].as_str().unwrap().trim_matches(['[', ']']).split(", ");
    let [debug, metrics] = &others.collect::<Vec<_>>()[..] else { panic!("{serving}") };
    for (address, pages) in [(debug, &["/", "/rlconfig", "/stats"][..]), (metrics, &["/metrics"])] {
        for path in PATHS {
            let url = format!("http://{address}{path}");
            let (code, text) = get(&url);
            assert_eq!(code, if pages.contains(&path) { 200 } else { 404 }, "{url}");
            assert!(!text.contains("bob"), "{url} contains a name: {text}");
            let posted = agent().post(&url).send("{}").unwrap().status().as_u16();
            assert_eq!(posted, if pages.contains(&path) { 405 } else { 404 }, "POST {url}");
        }
    }
}
