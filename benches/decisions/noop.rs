//! The baseline: a tonic server that answers OK to every request, with the service's threading (a current-thread
//! runtime per worker, one acceptor, `TCP_NODELAY`). The cost of the service is reported relative to this server.

use std::net::TcpListener;

use sluicegate_proto::envoy::service::ratelimit::v3::{
    RateLimitRequest, RateLimitResponse,
    rate_limit_response::Code,
    rate_limit_service_server::{RateLimitService, RateLimitServiceServer},
};
use tokio::{net::TcpStream, sync::mpsc};
use tokio_stream::{StreamExt, wrappers::ReceiverStream};
use tonic::{Request, Response, Status, transport::Server};

struct Noop;

#[tonic::async_trait]
impl RateLimitService for Noop {
    async fn should_rate_limit(&self, _: Request<RateLimitRequest>) -> Result<Response<RateLimitResponse>, Status> {
        Ok(Response::new(RateLimitResponse { overall_code: Code::Ok.into(), ..RateLimitResponse::default() }))
    }
}

/// Serves until the process is killed, on a free port. Prints its address.
pub(crate) fn serve(workers: usize) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    println!("{}", listener.local_addr().unwrap());
    let senders: Vec<_> = (0..workers).map(|_| spawn_worker()).collect();
    for (connection, worker) in senders.iter().cycle().enumerate() {
        let (stream, _) = listener.accept().unwrap();
        stream.set_nodelay(true).unwrap();
        stream.set_nonblocking(true).unwrap();
        worker.blocking_send(stream).unwrap_or_else(|_| panic!("no worker for connection {connection}"));
    }
}

fn spawn_worker() -> mpsc::Sender<std::net::TcpStream> {
    let (sender, receiver) = mpsc::channel(64);
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let incoming = ReceiverStream::new(receiver).map(TcpStream::from_std);
            let server = Server::builder().add_service(RateLimitServiceServer::new(Noop));
            server.serve_with_incoming(incoming).await.unwrap();
        });
    });
    sender
}
