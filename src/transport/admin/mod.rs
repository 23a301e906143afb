//! The operators' listener: `sluicegate.admin.v1` as gRPC and as JSON, for those who show a token or a certificate.
//!
//! Off unless it has an address, and then only with one of the two. It runs on the control runtime; decisions do not meet
//! it.

mod auth;
mod convert;
mod json;
mod openapi;
mod service;

use std::{io, net::SocketAddr, path::PathBuf, sync::Arc};

use axum::{
    Router,
    extract::{DefaultBodyLimit, Request, State},
    http::{
        StatusCode,
        header::{AUTHORIZATION, CONTENT_TYPE},
    },
    middleware::{self, Next},
    response::Response,
    routing::{get, post},
};
use rustls::pki_types::CertificateDer;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use sluicegate_proto::{FILE_DESCRIPTOR_SET, sluicegate::admin::v1::admin_service_server::AdminServiceServer};
use tokio::sync::watch;
use tonic::service::Routes;

pub use self::auth::TokenError;
use self::{
    auth::{Authenticator, Caller},
    service::Service,
};
use super::{TlsError, grpc::TlsSettings, http_server::HttpServer, tls::Tls};
use crate::service::Admin;

/// No message is longer: a hundred overrides with all their words are not.
const LONGEST_MESSAGE: usize = 1 << 20;
/// Operators and dashboards are few.
const MOST_CONNECTIONS: usize = 128;

/// Who may operate the service, and where.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Settings {
    /// Where to listen; without it there is no way in.
    pub addr: Option<SocketAddr>,
    /// Connections at most; when all are taken, the one that was answered least lately gives way to the next.
    pub max_connections: usize,
    /// Tokens: a line each, `read TOKEN NAME` or `operate TOKEN NAME`; followed while running.
    pub token_file: Option<PathBuf>,
    /// Certificates; with a client CA, callers can be known by theirs.
    pub tls: TlsSettings,
    /// Names (DNS, or addresses) in the certificates of those who may do everything.
    pub operate: Vec<String>,
    /// And of those who may only look.
    pub read: Vec<String>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            addr: None,
            max_connections: MOST_CONNECTIONS,
            token_file: None,
            tls: TlsSettings::default(),
            operate: Vec::new(),
            read: Vec::new(),
        }
    }
}

/// Why there is no way in for operators.
#[derive(Debug, thiserror::Error)]
pub enum AdminServerError {
    /// The address.
    #[error("cannot listen on {addr} for operators")]
    Listen {
        /// Where.
        addr: SocketAddr,
        /// What went wrong.
        source: io::Error,
    },
    /// Who may call.
    #[error(transparent)]
    Tokens(#[from] TokenError),
    /// A name that no certificate can have.
    #[error("admin.operate and admin.read have DNS names or addresses, not {0:?}")]
    Name(String),
    /// The certificates.
    #[error("TLS cannot be served to operators")]
    Tls(#[from] TlsError),
    /// Nobody could call.
    #[error("admin.addr needs admin.token_file, or admin.tls.client_ca_file with names in admin.operate or admin.read")]
    Nobody,
}

/// The listener, and who may come in.
pub struct Server {
    http: HttpServer,
    callers: Arc<Authenticator>,
}

impl Server {
    /// Listens, if the settings say where.
    pub async fn bind(settings: &Settings) -> Result<Option<Self>, AdminServerError> {
        let Some(addr) = settings.addr else {
            return Ok(None);
        };
        let names = !settings.operate.is_empty() || !settings.read.is_empty();
        let certified = settings.tls.client_ca_file.is_some() && names;
        if settings.token_file.is_none() && !certified {
            return Err(AdminServerError::Nobody);
        }
        let callers = Authenticator::new(settings)?;
        let tls = Tls::new(&settings.tls, &[b"h2", b"http/1.1"])?;
        let http = HttpServer::bind(addr, tls, settings.max_connections, "admin").await;
        Ok(Some(Self { http: http.map_err(|source| AdminServerError::Listen { addr, source })?, callers }))
    }

    /// Where it listens, the port settled.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.http.local_addr()
    }

    /// Serves until it is told to stop.
    pub async fn run(self, admin: Admin, stopping: watch::Receiver<bool>) {
        let Self { http, callers } = self;
        tokio::spawn(Arc::clone(&callers).follow());
        let router = router(admin, &callers);
        let of = move |certificate: Option<&CertificateDer<'_>>| {
            let certified = certificate.and_then(|it| callers.by_certificate(it));
            router.clone().layer(axum::Extension(Certified(certified)))
        };
        http.run(of, stopping).await;
    }
}

/// Who the connection's certificate says it is.
#[derive(Clone)]
struct Certified(Option<Caller>);

fn router(admin: Admin, callers: &Arc<Authenticator>) -> Router {
    let service = Arc::new(Service::new(admin));
    let grpc = AdminServiceServer::from_arc(Arc::clone(&service)).max_decoding_message_size(LONGEST_MESSAGE);
    let mut routes = Routes::new(grpc);
    let reflection =
        tonic_reflection::server::Builder::configure().register_encoded_file_descriptor_set(FILE_DESCRIPTOR_SET);
    if let Ok(reflection) = reflection.build_v1() {
        routes = routes.add_service(reflection);
    }
    let json = Router::new()
        .route("/v1/{method}", post(json::call))
        .route("/openapi.json", get(openapi::describe))
        .layer(DefaultBodyLimit::max(LONGEST_MESSAGE))
        .with_state(service);
    let authenticated = middleware::from_fn_with_state(Arc::clone(callers), authenticate);
    routes.prepare().into_axum_router().merge(json).layer(authenticated)
}

/// Nobody gets further who is not known. What he may do is asked where it is done.
async fn authenticate(State(callers): State<Arc<Authenticator>>, mut request: Request, next: Next) -> Response {
    let certified = request.extensions().get::<Certified>().and_then(|certified| certified.0.clone());
    let token = request.headers().get(AUTHORIZATION).and_then(|value| value.to_str().ok());
    let token =
        token.and_then(|value| value.split_once(' ')).filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"));
    // A token says more than a certificate that many programs of a machine may share.
    let caller = match token {
        Some((_, token)) => callers.by_token(token.trim()),
        None => certified,
    };
    let is_grpc = is_grpc(&request);
    let Some(caller) = caller else {
        let status = tonic::Status::unauthenticated(
            "show a token of admin.token_file (authorization: Bearer TOKEN), or a certificate",
        );
        return refuse(StatusCode::UNAUTHORIZED, &status, is_grpc);
    };
    request.extensions_mut().insert(caller);
    next.run(request).await
}

fn is_grpc(request: &Request) -> bool {
    let kind = request.headers().get(CONTENT_TYPE);
    kind.is_some_and(|kind| kind.as_bytes().starts_with(b"application/grpc"))
}

fn refuse(code: StatusCode, status: &tonic::Status, is_grpc: bool) -> Response {
    if is_grpc {
        return status.clone().into_http::<axum::body::Body>();
    }
    json::refuse(code, status)
}

/// As a caller without a name would never get here.
fn caller<T>(request: &tonic::Request<T>) -> Result<Caller, tonic::Status> {
    request.extensions().get::<Caller>().cloned().ok_or_else(|| tonic::Status::unauthenticated("nobody calls"))
}
