//! What resources say of themselves, told and asked.

use std::time::Duration;

use sluicegate_proto::sluicegate::v1::{
    self, GetRequest, ReportRequest, resource_service_client::ResourceServiceClient,
};
use tokio::time::timeout;
use tonic::transport::Channel;

use crate::{
    client::Client,
    verdict::{Failure, text},
};

/// What all say of a resource whose reports still hold.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Utilization {
    /// The highest, from 0 to 1.
    pub worst: f64,
    /// The mean.
    pub mean: f64,
    /// How many say something; 0: nobody does, and the rest means nothing.
    pub reporters: u32,
}

impl Client {
    /// Says how much of a resource is in use, from 0 to 1, for a while (an hour at most), and hears what all say.
    ///
    /// # Errors
    /// When the service does not answer within the client's deadline.
    pub async fn report(
        &self,
        resource: &str,
        reporter: &str,
        utilization: f64,
        life: Duration,
    ) -> Result<Utilization, Failure> {
        let life_us = u64::try_from(life.as_micros()).unwrap_or(u64::MAX);
        let (resource, reporter) = (resource.to_owned(), reporter.to_owned());
        let report = ReportRequest { resource, reporter, utilization, ttl_us: life_us };
        self.ask_resources(report, async |mut service, report| service.report(report).await).await
    }

    /// What all say of a resource.
    ///
    /// # Errors
    /// When the service does not answer within the client's deadline.
    pub async fn utilization(&self, resource: &str) -> Result<Utilization, Failure> {
        let get = GetRequest { resource: resource.to_owned() };
        self.ask_resources(get, async |mut service, get| service.get(get).await).await
    }

    async fn ask_resources<T>(
        &self,
        message: T,
        ask: impl AsyncFnOnce(
            ResourceServiceClient<Channel>,
            tonic::Request<T>,
        ) -> Result<tonic::Response<v1::Utilization>, tonic::Status>,
    ) -> Result<Utilization, Failure> {
        let endpoints = self.inner.endpoints();
        let endpoint = endpoints.any(self.inner.began.elapsed()).ok_or(Failure::Unreachable)?;
        let (channel, request) = endpoint.call(message);
        let deadline = self.inner.deadline;
        let asked = timeout(deadline, ask(ResourceServiceClient::new(channel), request)).await;
        let said = asked.map_err(|_| Failure::Deadline(deadline))?;
        let v1::Utilization { reporters, worst, mean } =
            said.map_err(|status| Failure::Service { code: status.code(), message: text(&status) })?.into_inner();
        Ok(Utilization { worst, mean, reporters })
    }
}
