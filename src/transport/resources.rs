//! `sluicegate.v1.ResourceService`, on tonic because it receives only a few calls per second.

use sluicegate_proto::sluicegate::v1::{self, GetRequest, ReportRequest, resource_service_server};
use tokio::runtime::Handle;
use tonic::{Request, Response, Status};

use crate::{
    engine::{Micros, Report, ReportError, Utilization},
    service::{ResourceReports, resources::ResourceError},
};

/// Implementation of `sluicegate.v1.ResourceService`. Calls run on the runtime to which the store connection of the
/// reports belongs.
pub struct ResourceService {
    reports: ResourceReports,
    runtime: Handle,
}

impl ResourceService {
    /// Creates the service. Must be called on the runtime to which the store connection of `reports` belongs.
    ///
    /// # Panics
    ///
    /// Panics if it is called outside of a Tokio runtime.
    #[must_use]
    pub fn new(reports: ResourceReports) -> Self {
        Self { reports, runtime: Handle::current() }
    }

    async fn run<F>(&self, work: F) -> Result<Response<v1::Utilization>, Status>
    where
        F: Future<Output = Result<Option<Utilization>, ResourceError>> + Send + 'static,
    {
        let result = self.runtime.spawn(work).await.map_err(|_| Status::unavailable("the service is shutting down"))?;
        result.map(|utilization| Response::new(write(utilization))).map_err(|error| status(&error))
    }
}

#[tonic::async_trait]
impl resource_service_server::ResourceService for ResourceService {
    async fn report(&self, request: Request<ReportRequest>) -> Result<Response<v1::Utilization>, Status> {
        let reports = self.reports.clone();
        let request = request.into_inner();
        self.run(async move {
            let ReportRequest { resource, reporter, utilization, ttl_us } = &request;
            let ttl = Micros::new(*ttl_us);
            reports.report(&Report { resource, reporter, utilization: *utilization, ttl }).await
        })
        .await
    }

    async fn get(&self, request: Request<GetRequest>) -> Result<Response<v1::Utilization>, Status> {
        let reports = self.reports.clone();
        let request = request.into_inner();
        self.run(async move { reports.get(&request.resource).await }).await
    }
}

fn write(utilization: Option<Utilization>) -> v1::Utilization {
    let Utilization { max, mean, reporters } = utilization.unwrap_or_default();
    v1::Utilization { reporters, max, mean }
}

fn status(error: &ResourceError) -> Status {
    let message = crate::metrics::chain(error);
    match error {
        ResourceError::Name | ResourceError::Utilization | ResourceError::Ttl => Status::invalid_argument(message),
        ResourceError::Report(ReportError::Full) => Status::resource_exhausted(message),
        ResourceError::Report(ReportError::Store(_)) | ResourceError::Store(_) => Status::unavailable(message),
    }
}
