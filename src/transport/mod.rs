//! The network protocols: gRPC, HTTP, the admin API and xDS, with their status codes and their limits on input. Other
//! modules contain nothing that is specific to gRPC or HTTP.

pub mod admin;
mod browser_security;
pub mod cluster;
mod connections;
pub mod console;
mod decisions;
mod errors;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
pub mod grpc;
pub mod http;
mod http_server;
pub mod input;
mod quotas;
mod resources;
mod services;
mod shutdown;
#[cfg(test)]
mod testing;
mod texts;
mod tls;
pub mod xds;

pub use decisions::{HeaderStyle, ResponseSettings};
pub use errors::CallerErrors;
pub use quotas::QuotaService;
pub use resources::ResourceService;
pub(crate) use services::HEALTH_NAMES;
pub use services::{Services, build_tonic_services};
pub use tls::TlsError;

use self::http_server::Rejection;
use crate::metrics::{Instrument, Label, Meter};

/// Registers the numbers of requests that the HTTP listeners rejected, and of connections that made room for others on
/// all listeners, with `meter`.
pub fn observe_listeners(meter: &dyn Meter, grpc: &grpc::Server, http: &http::Server, admin: Option<&admin::Server>) {
    let listeners: Vec<_> = http.listeners().chain(admin.map(admin::Server::listener)).collect();
    let all_rejections: Vec<_> = listeners.iter().map(|listener| listener.rejections()).collect();
    let mut all_connections: Vec<_> = listeners.iter().map(|listener| listener.connections()).collect();
    all_connections.push(grpc.connections());
    let description = "HTTP requests that were too large, too slow or without memory, and responses that were not read";
    meter.register(Instrument::counter("sluicegate_http_rejected_requests_total", description, move |observer| {
        for rejections in &all_rejections {
            for reason in Rejection::ALL {
                let listener = Label::new("listener", rejections.listener());
                observer.observe(rejections.count(reason), [listener, Label::new("reason", reason.name())]);
            }
        }
    }));
    let description = "Connections that were closed at the maximum number to make room for others";
    meter.register(Instrument::counter("sluicegate_evicted_connections_total", description, move |observer| {
        for connections in &all_connections {
            let listener = Label::new("listener", connections.listener());
            observer.observe(connections.evictions(), [listener]);
        }
    }));
}
