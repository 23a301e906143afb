//! Parts of members that a test implements itself.

use std::{net::SocketAddr, pin::Pin};

use sluicegate_proto::sluicegate::cluster::v1::cluster_service_server::{ClusterService, ClusterServiceServer};
use tokio_stream::Stream;
use tonic::{
    Response, Status,
    transport::{Server, server::TcpIncoming},
};

use crate::cluster::members::{background_runtime, free_address};

/// A stream of pages.
pub(super) type Pages<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// Returns a response with these pages.
pub(super) fn pages<T: Send + 'static>(pages: Vec<T>) -> Response<Pages<T>> {
    Response::new(Box::pin(tokio_stream::iter(pages.into_iter().map(Ok))))
}

/// Serves a member on a free port and returns its address.
pub(super) fn serve(member: impl ClusterService) -> SocketAddr {
    let runtime = background_runtime();
    let _entered = runtime.enter();
    let incoming = TcpIncoming::bind(free_address()).unwrap();
    let address = incoming.local_addr().unwrap();
    runtime.spawn(Server::builder().add_service(ClusterServiceServer::new(member)).serve_with_incoming(incoming));
    address
}
