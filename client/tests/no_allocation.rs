//! A check that is answered without a call needs no memory. In a test of its own: what others allocate would be counted.

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

/// Grants a million hits to some, and refuses the others.
#[derive(Default)]
struct Service {
    asked: Arc<AtomicUsize>,
}

#[tonic::async_trait]
impl RateLimitService for Service {
    async fn should_rate_limit(
        &self,
        request: Request<RateLimitRequest>,
    ) -> Result<Response<RateLimitResponse>, Status> {
        self.asked.fetch_add(1, Relaxed);
        let granted = request.into_inner().descriptors[0].entries[0].value == "granted";
        let code = if granted { Code::Ok } else { Code::OverLimit };
        let status = DescriptorStatus {
            code: code.into(),
            current_limit: Some(RateLimit { name: "a name".into(), requests_per_unit: 1, ..RateLimit::default() }),
            duration_until_reset: Some(prost_types::Duration { seconds: 600, nanos: 0 }),
            quota: granted.then(|| Quota { requests: 1_000_000, ..Quota::default() }),
            ..DescriptorStatus::default()
        };
        let answer =
            RateLimitResponse { overall_code: code.into(), statuses: vec![status], ..RateLimitResponse::default() };
        let mut response = Response::new(answer);
        response
            .metadata_mut()
            .insert("sluicegate-grant-life-us", tonic::metadata::MetadataValue::from_static("600000000"));
        Ok(response)
    }
}

#[tokio::test]
async fn an_answer_that_is_known_needs_no_memory() -> Result<(), Box<dyn std::error::Error>> {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let url = format!("http://{}", listener.local_addr()?);
    let service = Service::default();
    let asked = Arc::clone(&service.asked);
    let server = tonic::transport::Server::builder().add_service(RateLimitServiceServer::new(service));
    tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
    let client = Client::builder(url).domain("d").deadline(Duration::from_secs(10)).connect_lazy()?;
    for (user, by) in [("granted", DecidedBy::Grant), ("refused", DecidedBy::DenyCache)] {
        let check = async || client.check([descriptor! { "user" => user, "path" => "/v1/charges" }]).await;
        assert_eq!(check().await.decided_by(), DecidedBy::Server);
        let (mut verdicts, mut future) = (
            0,
            Box::pin(async {
                for _ in 0..1_000 {
                    assert_eq!(check().await.decided_by(), by);
                }
            }),
        );
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        let allocations = allocation_counter::measure(|| {
            // Nothing is waited for: it is done at once.
            verdicts += usize::from(future.as_mut().poll(&mut context).is_ready());
        });
        assert_eq!((verdicts, allocations.count_total), (1, 0), "{by:?}");
    }
    assert_eq!(asked.load(Relaxed), 2);
    Ok(())
}
