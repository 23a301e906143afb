//! [`Utilization`] of resources: reporting it to the service and reading it.

use std::time::Duration;

use sluicegate_proto::sluicegate::v1::{
    self, GetRequest, ReportRequest, resource_service_client::ResourceServiceClient,
};
use tokio::time::timeout;
use tonic::transport::Channel;

use crate::{
    client::Client,
    verdict::{Failure, full_message},
};

/// Combined utilization of a resource, from all reports that have not expired.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Utilization {
    /// Highest reported utilization, from 0 to 1.
    pub max: f64,
    /// Mean of the reported utilizations, from 0 to 1.
    pub mean: f64,
    /// Number of reporters. If it is 0, the other fields have no meaning.
    pub reporters: u32,
}

impl Client {
    /// Reports the utilization of a resource, from 0 to 1, and returns the combined utilization.
    ///
    /// The report is valid for `ttl`, which must be above zero and at most one hour. The next report of the same
    /// `reporter` replaces it.
    ///
    /// # Errors
    ///
    /// Returns a [`Failure`] if the service does not answer within [`Builder::timeout`](crate::Builder::timeout), or if
    /// it rejects the report.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// use std::time::Duration;
    ///
    /// use sluicegate_client::{Client, Failure};
    ///
    /// # async fn example(client: Client) -> Result<(), Failure> {
    /// let database = client.report_utilization("db", "replica-1", 0.75, Duration::from_secs(5)).await?;
    /// println!("mean of {} reporters: {}", database.reporters, database.mean);
    /// # Ok(())
    /// # }
    /// ```
    pub async fn report_utilization(
        &self,
        resource: &str,
        reporter: &str,
        utilization: f64,
        ttl: Duration,
    ) -> Result<Utilization, Failure> {
        let ttl_us = u64::try_from(ttl.as_micros()).unwrap_or(u64::MAX);
        let report =
            ReportRequest { resource: resource.to_owned(), reporter: reporter.to_owned(), utilization, ttl_us };
        self.call_resource_service(report, async |mut service, report| service.report(report).await).await
    }

    /// Returns the combined utilization of a resource.
    ///
    /// # Errors
    ///
    /// Returns a [`Failure`] if the service does not answer within [`Builder::timeout`](crate::Builder::timeout), or if
    /// it rejects the request.
    pub async fn utilization(&self, resource: &str) -> Result<Utilization, Failure> {
        let get = GetRequest { resource: resource.to_owned() };
        self.call_resource_service(get, async |mut service, get| service.get(get).await).await
    }

    async fn call_resource_service<T>(
        &self,
        message: T,
        call: impl AsyncFnOnce(
            ResourceServiceClient<Channel>,
            tonic::Request<T>,
        ) -> Result<tonic::Response<v1::Utilization>, tonic::Status>,
    ) -> Result<Utilization, Failure> {
        let endpoints = self.inner.endpoints();
        let endpoint = endpoints.any(self.inner.started_at.elapsed()).ok_or(Failure::Unreachable)?;
        let (channel, request) = endpoint.call(message);
        let limit = self.inner.timeout;
        let result = timeout(limit, call(ResourceServiceClient::new(channel), request)).await;
        let response = match result {
            Ok(Ok(response)) => response,
            Ok(Err(status)) => {
                return Err(Failure::Service { code: status.code(), message: full_message(&status) });
            }
            Err(_) => return Err(Failure::Timeout(limit)),
        };
        let v1::Utilization { reporters, max, mean } = response.into_inner();
        Ok(Utilization { max, mean, reporters })
    }
}
