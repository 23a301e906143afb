//! `sluicegate.v1.ResourceService`, by tonic: it is asked a few times a second.

use sluicegate_proto::sluicegate::v1::{self, GetRequest, ReportRequest, resource_service_server};
use tokio::runtime::Handle;
use tonic::{Request, Response, Status};

use crate::{
    engine::{Micros, Report, ReportError, Utilization},
    service::{ResourceReports, resources::ResourceError},
};

/// Answers calls. The reports live on the runtime that has their connection to the store.
pub struct ResourceService {
    reports: ResourceReports,
    runtime: Handle,
}

impl ResourceService {
    /// To be made on the runtime on which the reports are kept.
    #[must_use]
    pub fn new(reports: ResourceReports) -> Self {
        Self { reports, runtime: Handle::current() }
    }

    async fn run<F>(&self, work: F) -> Result<Response<v1::Utilization>, Status>
    where
        F: Future<Output = Result<Option<Utilization>, ResourceError>> + Send + 'static,
    {
        let said = self.runtime.spawn(work).await.map_err(|_| Status::unavailable("the service is going"))?;
        said.map(|said| Response::new(write(said))).map_err(|error| refuse(&error))
    }
}

#[tonic::async_trait]
impl resource_service_server::ResourceService for ResourceService {
    async fn report(&self, request: Request<ReportRequest>) -> Result<Response<v1::Utilization>, Status> {
        let (reports, request) = (self.reports.clone(), request.into_inner());
        self.run(async move {
            let ReportRequest { resource, reporter, utilization, ttl_us } = &request;
            let ttl = Micros::new(*ttl_us);
            reports.report(&Report { resource, reporter, utilization: *utilization, ttl }).await
        })
        .await
    }

    async fn get(&self, request: Request<GetRequest>) -> Result<Response<v1::Utilization>, Status> {
        let (reports, request) = (self.reports.clone(), request.into_inner());
        self.run(async move { reports.get(&request.resource).await }).await
    }
}

fn write(said: Option<Utilization>) -> v1::Utilization {
    let Utilization { worst, mean, reporters } = said.unwrap_or_default();
    v1::Utilization { reporters, worst, mean }
}

fn refuse(error: &ResourceError) -> Status {
    let message = crate::errors::chain(error);
    match error {
        ResourceError::Name | ResourceError::Utilization | ResourceError::Life => Status::invalid_argument(message),
        ResourceError::Report(ReportError::Full) => Status::resource_exhausted(message),
        ResourceError::Report(ReportError::Store(_)) | ResourceError::Store(_) => Status::unavailable(message),
    }
}
