//! The admin API, [`Server`]: `sluicegate.admin.v1` as gRPC and as JSON, for callers with a token or a certificate.
//!
//! The admin API is off unless an address is configured, and the address requires tokens or certificates. The server
//! runs on the control runtime, so calls do not delay decisions.

mod activity;
mod auth;
mod convert;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
mod json;
mod openapi;
mod roles;
mod rule_filter;
mod service;
mod simulate;

use std::{io, net::SocketAddr, path::PathBuf, sync::Arc};

use axum::{
    Router,
    extract::{Request, State},
    http::{HeaderMap, StatusCode, header::AUTHORIZATION},
    middleware::{self, Next},
    response::Response,
    routing::{get, post},
};
use serde::{Deserialize, Serialize};
use sluicegate_proto::{
    FILE_DESCRIPTOR_SET,
    sluicegate::admin::v1::admin_service_server::{self, AdminServiceServer},
};
use tokio::sync::watch;
use tonic::service::Routes;

pub use self::auth::TokenError;
pub(super) use self::auth::{Caller, Role};
use self::{
    auth::Authenticator,
    service::{Offer, Service},
};
use super::{
    TlsError,
    http_server::{Authenticated, Connection, HttpServer, is_grpc},
    tls::{Tls, TlsSettings},
};
use crate::{budget::Budget, service::Admin};

/// Maximum size of a message. A hundred overrides with the longest values fit, and a part of an access log.
const MAX_MESSAGE_BYTES: usize = 1 << 20;
/// Beginning of the paths of gRPC calls.
const GRPC_PREFIX: &str = "/sluicegate.admin.v1.AdminService/";
/// Default of [`Settings::max_connections`]. Operators and dashboards are few.
const DEFAULT_MAX_CONNECTIONS: usize = 128;

/// Settings of the admin API.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(default)]
pub struct Settings {
    /// Address to listen on. Without it, the admin API is off.
    pub addr: Option<SocketAddr>,
    /// Maximum number of connections. Above it, a new connection replaces another one.
    pub max_connections: usize,
    /// File with one token per line, `read TOKEN NAME` or `operate TOKEN NAME`. Reloaded when it changes.
    pub token_file: Option<PathBuf>,
    /// Certificates. With a client CA, callers can authenticate by certificate.
    pub tls: TlsSettings,
    /// DNS names or IP addresses in the certificates of callers that may call all methods.
    pub operate: Vec<String>,
    /// DNS names or IP addresses in the certificates of callers that may only read.
    pub read: Vec<String>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            addr: None,
            max_connections: DEFAULT_MAX_CONNECTIONS,
            token_file: None,
            tls: TlsSettings::default(),
            operate: Vec::new(),
            read: Vec::new(),
        }
    }
}

impl Settings {
    /// Returns a problem of the settings, or `None` if they are valid.
    #[must_use]
    pub fn problem(&self) -> Option<&'static str> {
        if self.max_connections == 0 {
            return Some("admin.max_connections must be greater than 0");
        }
        None
    }
}

/// Error returned when the admin API cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum AdminServerError {
    /// The address cannot be bound.
    #[error("cannot listen on {addr} for the admin API")]
    Listen {
        /// The address.
        addr: SocketAddr,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The token file is invalid.
    #[error(transparent)]
    Tokens(#[from] TokenError),
    /// A name in `operate` or `read` is no DNS name and no IP address.
    #[error("admin.operate and admin.read must contain DNS names or IP addresses, not {0:?}")]
    Name(String),
    /// TLS cannot be configured.
    #[error("cannot configure TLS for the admin API")]
    Tls(#[from] TlsError),
    /// No caller could authenticate.
    #[error("admin.addr needs admin.token_file, or admin.tls.client_ca_file with names in admin.operate or admin.read")]
    NoAuthentication,
}

/// The listener of the admin API.
pub struct Server {
    http: HttpServer,
    authenticator: Arc<Authenticator>,
}

impl Server {
    /// Opens the listener. Returns `None` if the settings contain no address.
    ///
    /// # Errors
    ///
    /// Returns an error if no caller could authenticate, a file or a name is invalid, or the address cannot be bound.
    pub(crate) async fn bind(settings: &Settings, input: &Budget) -> Result<Option<Self>, AdminServerError> {
        let Some(addr) = settings.addr else {
            return Ok(None);
        };
        let has_names = !settings.operate.is_empty() || !settings.read.is_empty();
        let certified = settings.tls.client_ca_file.is_some() && has_names;
        if settings.token_file.is_none() && !certified {
            return Err(AdminServerError::NoAuthentication);
        }
        let authenticator = Authenticator::new(settings)?;
        let tls = Tls::new(&settings.tls, &[b"h2", b"http/1.1"])?;
        let http = HttpServer::bind(addr, tls, settings.max_connections, "admin", input).await;
        Ok(Some(Self { http: http.map_err(|source| AdminServerError::Listen { addr, source })?, authenticator }))
    }

    /// Returns the address with the actual port.
    ///
    /// # Errors
    ///
    /// Returns an error if the operating system does not return the address.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.http.local_addr()
    }

    /// Returns the listener.
    pub(super) const fn listener(&self) -> &HttpServer {
        &self.http
    }

    /// Serves the API and the pages of the console until `stopping` is true.
    pub async fn run(self, api: Api, pages: Router, stopping: watch::Receiver<bool>) {
        let Self { http, authenticator } = self;
        tokio::spawn(Arc::clone(&authenticator).follow());
        let router = router(&api, &authenticator).merge(pages);
        http.run(move |connection| router_for(connection, &router, &authenticator), stopping).await;
    }
}

/// The methods of the admin API, for all listeners that serve them.
#[derive(Clone)]
pub struct Api {
    service: Arc<Service>,
    authenticator: Option<Arc<Authenticator>>,
}

impl Api {
    /// Creates the API. Other listeners accept the tokens of `server`, too. Streams end when
    /// `stopping` is true.
    #[must_use]
    pub fn new(
        admin: Admin,
        server: Option<&Server>,
        grafana_url: Option<String>,
        stopping: watch::Receiver<bool>,
    ) -> Self {
        let authenticator = server.map(|server| Arc::clone(&server.authenticator));
        let accepts_tokens = authenticator.as_ref().is_some_and(|authenticator| authenticator.accepts_tokens());
        let offer = Offer { accepts_tokens, grafana_url: grafana_url.unwrap_or_default() };
        Self { service: Arc::new(Service::new(admin, offer, stopping)), authenticator }
    }

    /// Returns the caller that the bearer token of a request identifies, or `None` if the request has no token.
    ///
    /// # Errors
    ///
    /// Returns the response to the request if the token is unknown.
    pub(super) fn caller_with_token(&self, headers: &HeaderMap) -> Option<Result<Caller, Box<Response>>> {
        let token = bearer_token(headers)?;
        let caller = self.authenticator.as_ref().and_then(|authenticator| authenticator.by_token(token));
        Some(caller.ok_or_else(|| {
            let status = tonic::Status::unauthenticated(match &self.authenticator {
                Some(_) => "the token is not in admin.token_file",
                None => "the admin API is off, so there are no tokens; set admin.addr and admin.token_file",
            });
            Box::new(json::error_response(StatusCode::UNAUTHORIZED, &status))
        }))
    }

    /// Returns the routes of the methods as JSON. Requests need a [`Caller`] as extension.
    pub(super) fn json_routes(&self) -> Router {
        Router::new()
            .route("/v1/{method}", post(json::call))
            .route("/openapi.json", get(openapi::describe))
            .with_state(Arc::clone(&self.service))
    }
}

/// The caller that the client certificate of a connection identifies.
#[derive(Clone)]
struct CertificateCaller(Option<Caller>);

/// Returns the routes for a connection, with the caller of its certificate.
fn router_for(connection: &Connection<'_>, router: &Router, authenticator: &Authenticator) -> Router {
    let certificate = connection.certificate;
    let certified = certificate.and_then(|certificate| authenticator.by_certificate(certificate));
    router.clone().layer(axum::Extension(CertificateCaller(certified)))
}

fn router(api: &Api, authenticator: &Arc<Authenticator>) -> Router {
    let service = Arc::clone(&api.service);
    let grpc = AdminServiceServer::from_arc(service).max_decoding_message_size(MAX_MESSAGE_BYTES);
    let mut routes = Routes::new(grpc);
    let reflection = tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(FILE_DESCRIPTOR_SET)
        .with_service_name(admin_service_server::SERVICE_NAME)
        .with_service_name("grpc.reflection.v1.ServerReflection");
    if let Ok(reflection) = reflection.build_v1() {
        routes = routes.add_service(reflection);
    }
    let authenticated = middleware::from_fn_with_state(Arc::clone(authenticator), authenticate);
    routes.prepare().into_axum_router().merge(api.json_routes()).layer(authenticated)
}

/// Returns the token of the header `authorization: Bearer TOKEN`.
fn bearer_token(headers: &HeaderMap) -> Option<&str> {
    let (scheme, token) = headers.get(AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
    if scheme.eq_ignore_ascii_case("bearer") { Some(token.trim()) } else { None }
}

/// Rejects requests without a known caller, and gRPC calls of callers without the role of the method. Calls as JSON
/// check the role before they read their body.
async fn authenticate(State(authenticator): State<Arc<Authenticator>>, mut request: Request, next: Next) -> Response {
    let certified = request.extensions().get::<CertificateCaller>().and_then(|caller| caller.0.clone());
    // A token has precedence: many programs on a host may share one certificate.
    let caller = match bearer_token(request.headers()) {
        Some(token) => authenticator.by_token(token),
        None => certified,
    };
    let is_grpc = is_grpc(&request);
    let Some(caller) = caller else {
        let status = tonic::Status::unauthenticated(
            "authentication requires a token of admin.token_file (authorization: Bearer TOKEN) or a client certificate",
        );
        return error_response(StatusCode::UNAUTHORIZED, &status, is_grpc);
    };
    // tonic serves a method by its path, with any content type.
    if let Some(method) = request.uri().path().strip_prefix(GRPC_PREFIX)
        && let Err(status) = roles::authorize(&caller, method)
    {
        return error_response(json::http_code(&status), &status, is_grpc);
    }
    Authenticated::record(&request);
    request.extensions_mut().insert(caller);
    next.run(request).await
}

/// Returns an error response in the protocol of the request.
fn error_response(code: StatusCode, status: &tonic::Status, is_grpc: bool) -> Response {
    if is_grpc {
        return status.clone().into_http::<axum::body::Body>();
    }
    json::error_response(code, status)
}

/// Returns the caller of a request. Fails only if [`authenticate`] did not run.
fn caller<T>(request: &tonic::Request<T>) -> Result<Caller, tonic::Status> {
    request
        .extensions()
        .get::<Caller>()
        .cloned()
        .ok_or_else(|| tonic::Status::unauthenticated("the request has no authenticated caller"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::budget::Victim;

    #[tokio::test]
    async fn callers_need_a_token_file_or_a_client_ca_and_a_name() {
        for (client_ca, operate, read, is_rejected) in [
            (true, true, true, false),
            (true, true, false, false),
            (true, false, true, false),
            (true, false, false, true),
            (false, true, false, true),
            (false, false, true, true),
            (false, false, false, true),
        ] {
            let names = |is_set: bool| if is_set { vec!["ops.example.com".to_owned()] } else { Vec::new() };
            let client_ca_file = client_ca.then(|| "ca.pem".into());
            let settings = Settings {
                addr: Some(SocketAddr::from(([127, 0, 0, 1], 0))),
                tls: TlsSettings { client_ca_file, ..TlsSettings::default() },
                operate: names(operate),
                read: names(read),
                ..Settings::default()
            };
            // The settings that are not rejected lack the certificate of the server.
            let error = Server::bind(&settings, &Budget::new("input", 1 << 20, Victim::Oldest)).await.err().unwrap();
            assert_eq!(matches!(error, AdminServerError::NoAuthentication), is_rejected, "{settings:?}: {error}");
        }
    }
}
