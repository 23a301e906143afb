//! `/resources/{name}`: reports and returns the utilization of a resource in JSON.

use std::{sync::Arc, time::Duration};

use axum::{
    body::Bytes,
    extract::{Path, State},
    http::{StatusCode, header::CONTENT_TYPE},
    response::{IntoResponse, Response},
};
use serde::{Deserialize, Serialize};

use super::Handlers;
use crate::{
    engine::{Micros, Report, ReportError, Utilization},
    service::resources::ResourceError,
};

/// The body of a report: `{"reporter": "db-1", "utilization": 0.4, "ttl": "10s"}`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ReportBody {
    reporter: String,
    utilization: f64,
    #[serde(with = "sluicegate_duration::Text")]
    ttl: Duration,
}

/// The utilization of a resource. Without reports, the body contains no numbers except `reporters`.
#[derive(Serialize)]
struct UtilizationBody {
    reporters: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    max: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    mean: Option<f64>,
}

pub(super) async fn report(
    State(handlers): State<Arc<Handlers>>,
    Path(resource): Path<String>,
    body: Bytes,
) -> Response {
    let body: ReportBody = match serde_json::from_slice(&body) {
        Ok(body) => body,
        Err(error) => {
            return (StatusCode::BAD_REQUEST, format!("the body is not a valid report: {error}\n")).into_response();
        }
    };
    let ttl = Micros::new(u64::try_from(body.ttl.as_micros()).unwrap_or(u64::MAX));
    let report = Report { resource: &resource, reporter: &body.reporter, utilization: body.utilization, ttl };
    respond(handlers.reports.report(&report).await)
}

pub(super) async fn get(State(handlers): State<Arc<Handlers>>, Path(resource): Path<String>) -> Response {
    respond(handlers.reports.get(&resource).await)
}

fn respond(result: Result<Option<Utilization>, ResourceError>) -> Response {
    match result {
        Ok(utilization) => {
            let body = UtilizationBody {
                reporters: utilization.map(|utilization| utilization.reporters).unwrap_or_default(),
                max: utilization.map(|utilization| utilization.max),
                mean: utilization.map(|utilization| utilization.mean),
            };
            let text = serde_json::to_string(&body).unwrap_or_default();
            ([(CONTENT_TYPE, "application/json")], text).into_response()
        }
        Err(error) => {
            let code = match error {
                ResourceError::Name | ResourceError::Utilization | ResourceError::Ttl => StatusCode::BAD_REQUEST,
                ResourceError::Report(ReportError::Full) => StatusCode::TOO_MANY_REQUESTS,
                ResourceError::Report(ReportError::Store(_)) | ResourceError::Store(_) => {
                    StatusCode::SERVICE_UNAVAILABLE
                }
            };
            (code, format!("{}\n", crate::metrics::chain(&error))).into_response()
        }
    }
}
