//! CPU time and memory of 10,000 buckets of Envoy's quota protocol, on 100 streams with a report each five seconds. The
//! baseline is the same service with the same streams before their first report.

use std::time::Duration;

use sluicegate_proto::envoy::service::rate_limit_quota::v3::{
    BucketId, RateLimitQuotaResponse, RateLimitQuotaUsageReports,
    rate_limit_quota_service_client::RateLimitQuotaServiceClient, rate_limit_quota_usage_reports::BucketQuotaUsage,
};
use tokio::{
    sync::mpsc,
    time::{interval, sleep},
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;

use super::process::Process;

const STREAMS: usize = 100;
/// Buckets of each stream.
const BUCKETS: usize = 100;
const INTERVAL: Duration = Duration::from_secs(5);
/// Time until the quotas of all callers have settled.
const WARM_UP: Duration = Duration::from_secs(40);
const MEASURED: Duration = Duration::from_secs(30);
/// Time for which the baseline is measured.
const BASELINE: Duration = Duration::from_secs(10);

pub(crate) fn run() {
    println!("\nQuotas: {STREAMS} streams with {BUCKETS} buckets each, a report each {INTERVAL:?}\n");
    println!(
        "| limit | users | CPU without reports, % of a core | CPU in addition, % of a core | CPU µs per report of a bucket | bytes per bucket |"
    );
    println!("| --- | --- | ---: | ---: | ---: | ---: |");
    for (limit, has_own_users) in [
        ("unit: second, requests_per_unit: 1000", true),
        ("unit: second, requests_per_unit: 1000, algorithm: token_bucket", true),
        ("unit: minute, requests_per_unit: 60000", true),
        ("unit: second, requests_per_unit: 1000", false),
    ] {
        let service = Process::service_with("memory", limit);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let (baseline, cpu, memory) = runtime.block_on(measure(&service, has_own_users));
        let reports = (STREAMS * BUCKETS) as f64 / INTERVAL.as_secs_f64();
        println!(
            "| {limit} | {} | {:.2} | {:.2} | {:.1} | {:.0} |",
            if has_own_users { "of one stream each" } else { "of all streams" },
            baseline * 100.0,
            (cpu - baseline) * 100.0,
            (cpu - baseline) / reports * 1e6,
            memory / (STREAMS * BUCKETS) as f64,
        );
    }
}

/// Returns the CPU seconds per second without and with reports, and the bytes of memory that the reports add.
async fn measure(service: &Process, has_own_users: bool) -> (f64, f64, f64) {
    let cpu = async |time: Duration| {
        let before = service.cpu_micros();
        sleep(time).await;
        (service.cpu_micros() - before) / 1e6 / time.as_secs_f64()
    };
    let mut streams = Vec::new();
    for index in 0..STREAMS {
        let mut client = RateLimitQuotaServiceClient::connect(format!("http://{}", service.address)).await.unwrap();
        let (sender, receiver) = mpsc::channel(4);
        let responses = client.stream_rate_limit_quotas(ReceiverStream::new(receiver)).await.unwrap().into_inner();
        streams.push((sender, if has_own_users { index * BUCKETS } else { 0 }));
        tokio::spawn(discard(responses));
    }
    sleep(Duration::from_secs(2)).await;
    let baseline = cpu(BASELINE).await;
    let before = service.resident();
    for (index, (sender, first)) in streams.into_iter().enumerate() {
        tokio::spawn(async move {
            // Streams report at different times.
            sleep(INTERVAL * index as u32 / STREAMS as u32).await;
            let mut ticks = interval(INTERVAL);
            loop {
                ticks.tick().await;
                let usage = |user| BucketQuotaUsage {
                    bucket_id: Some(BucketId { bucket: [("user".into(), format!("user-{user}"))].into() }),
                    num_requests_allowed: 10,
                    ..BucketQuotaUsage::default()
                };
                let bucket_quota_usages = (first..first + BUCKETS).map(usage).collect();
                let report = RateLimitQuotaUsageReports { domain: "bench".into(), bucket_quota_usages };
                if sender.send(report).await.is_err() {
                    return;
                }
            }
        });
    }
    sleep(WARM_UP).await;
    let memory = service.resident() - before;
    (baseline, cpu(MEASURED).await, memory)
}

async fn discard(mut responses: Streaming<RateLimitQuotaResponse>) {
    while let Ok(Some(_)) = responses.message().await {}
}
