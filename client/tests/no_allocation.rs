//! A check that is answered without a call makes no allocation. This is a separate binary, because allocations of other
//! tests would be counted.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use sluicegate_client::{Client, DecidedBy, descriptor};
use sluicegate_proto::envoy::service::ratelimit::v3::{
    RateLimitRequest, RateLimitResponse,
    rate_limit_response::{Code, DescriptorStatus, Quota, RateLimit},
    rate_limit_service_server::{RateLimitService, RateLimitServiceServer},
};
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status};

/// Grants a million hits to one user, and denies all others.
#[derive(Default)]
struct Service {
    calls: Arc<AtomicUsize>,
}

#[tonic::async_trait]
impl RateLimitService for Service {
    async fn should_rate_limit(
        &self,
        request: Request<RateLimitRequest>,
    ) -> Result<Response<RateLimitResponse>, Status> {
        self.calls.fetch_add(1, Relaxed);
        let granted = request.into_inner().descriptors[0].entries[0].value == "granted";
        let code = if granted { Code::Ok } else { Code::OverLimit };
        let status = DescriptorStatus {
            code: code.into(),
            current_limit: Some(RateLimit { name: "a name".into(), requests_per_unit: 1, ..RateLimit::default() }),
            duration_until_reset: Some(prost_types::Duration { seconds: 600, nanos: 0 }),
            quota: granted.then(|| Quota { requests: 1_000_000, ..Quota::default() }),
            ..DescriptorStatus::default()
        };
        let message =
            RateLimitResponse { overall_code: code.into(), statuses: vec![status], ..RateLimitResponse::default() };
        let mut response = Response::new(message);
        response
            .metadata_mut()
            .insert("sluicegate-grant-ttl-us", tonic::metadata::MetadataValue::from_static("600000000"));
        Ok(response)
    }
}

#[tokio::test]
async fn a_locally_answered_check_makes_no_allocation() -> Result<(), Box<dyn std::error::Error>> {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let url = format!("http://{}", listener.local_addr()?);
    let service = Service::default();
    let calls = Arc::clone(&service.calls);
    let server = tonic::transport::Server::builder().add_service(RateLimitServiceServer::new(service));
    tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
    let client = Client::builder(url).domain("d").timeout(Duration::from_secs(10)).connect_lazy()?;
    for (user, by) in [("granted", DecidedBy::Grant), ("denied", DecidedBy::DenyCache)] {
        let check = async || client.check([descriptor! { "user" => user, "path" => "/v1/charges" }]).await;
        assert_eq!(check().await.decided_by(), DecidedBy::Server);
        let (mut completed, mut future) = (
            0,
            Box::pin(async {
                for _ in 0..1_000 {
                    assert_eq!(check().await.decided_by(), by);
                }
            }),
        );
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        let allocations = allocation_counter::measure(|| {
            // No check waits, so the future completes in the first poll.
            completed += usize::from(future.as_mut().poll(&mut context).is_ready());
        });
        assert_eq!((completed, allocations.count_total), (1, 0), "{by:?}");
    }
    assert_eq!(calls.load(Relaxed), 2);
    Ok(())
}
