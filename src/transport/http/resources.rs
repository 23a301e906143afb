//! `/resources/{name}`: what resources say of themselves, in JSON.

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

/// What is posted: `{"reporter": "db-1", "utilization": 0.4, "life": "10s"}`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ReportBody {
    reporter: String,
    utilization: f64,
    #[serde(with = "crate::duration")]
    life: Duration,
}

/// What all say; without numbers when nobody does.
#[derive(Serialize)]
struct UtilizationBody {
    reporters: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    worst: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    mean: Option<f64>,
}

pub(super) async fn report(
    State(handlers): State<Arc<Handlers>>,
    Path(resource): Path<String>,
    body: Bytes,
) -> Response {
    let posted: ReportBody = match serde_json::from_slice(&body) {
        Ok(posted) => posted,
        Err(error) => return (StatusCode::BAD_REQUEST, format!("this is not a report: {error}\n")).into_response(),
    };
    let life = Micros::new(u64::try_from(posted.life.as_micros()).unwrap_or(u64::MAX));
    let report = Report { resource: &resource, reporter: &posted.reporter, utilization: posted.utilization, ttl: life };
    answer(handlers.reports.report(&report).await)
}

pub(super) async fn get(State(handlers): State<Arc<Handlers>>, Path(resource): Path<String>) -> Response {
    answer(handlers.reports.get(&resource).await)
}

fn answer(said: Result<Option<Utilization>, ResourceError>) -> Response {
    match said {
        Ok(said) => {
            let said = UtilizationBody {
                reporters: said.map_or(0, |said| said.reporters),
                worst: said.map(|said| said.worst),
                mean: said.map(|said| said.mean),
            };
            let text = serde_json::to_string(&said).unwrap_or_default();
            ([(CONTENT_TYPE, "application/json")], text).into_response()
        }
        Err(error) => {
            let code = match error {
                ResourceError::Name | ResourceError::Utilization | ResourceError::Life => StatusCode::BAD_REQUEST,
                ResourceError::Report(ReportError::Full) => StatusCode::TOO_MANY_REQUESTS,
                ResourceError::Report(ReportError::Store(_)) | ResourceError::Store(_) => {
                    StatusCode::SERVICE_UNAVAILABLE
                }
            };
            (code, format!("{}\n", crate::errors::chain(&error))).into_response()
        }
    }
}
