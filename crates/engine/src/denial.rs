//! [`DenialResponse`]: the content of the response to a denied request, from the rule that denies it.

use sluicegate_rules::{DenialValues, Measure};

use super::{Status, Verdict};

/// The content of the response to a denied request, from the rule that denies it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DenialResponse {
    /// HTTP status, if the rule has one.
    pub status: Option<u16>,
    /// Media type of the message; `None` without a message.
    pub content_type: Option<String>,
    /// The body of the response; empty if the rule has no message.
    pub message: String,
    /// Names and values of headers.
    pub headers: Vec<(String, String)>,
}

impl Verdict {
    /// Returns the content of the response to a denied request. Returns `None` if the request is allowed, or if no rule that
    /// denies it has a `denial`.
    ///
    /// If several rules deny it, the rule with the longest wait supplies the content.
    #[must_use]
    pub fn denial_response(&self) -> Option<DenialResponse> {
        if !self.is_denied() {
            return None;
        }
        let mut chosen: Option<&Status> = None;
        for status in &self.statuses {
            if !status.is_over() || status.denial.is_none() {
                continue;
            }
            if chosen.is_none_or(|chosen| status.is_later_than(chosen)) {
                chosen = Some(status);
            }
        }
        let status = chosen?;
        let denial = status.denial.as_deref()?;
        let limit = status.limit.as_ref();
        let limit_text = match (limit, &denial.currency) {
            (None, _) => String::new(),
            (Some(limit), Some(currency)) if matches!(limit.measure, Measure::Rate { .. }) => {
                format!("{} {}", currency.amount(limit.requests), limit.measure)
            }
            (Some(limit), Some(_) | None) => format!("{} {}", limit.requests, limit.measure),
        };
        let values = DenialValues {
            limit: &limit_text,
            name: limit.and_then(|limit| limit.name.as_deref()).unwrap_or_default(),
            plan: &denial.plan,
            reset: status.reset.map_or(0, sluicegate_algorithm::Micros::ceil_secs),
            wait: status.retry_after.map(|wait| wait.ceil_secs().max(1)),
        };
        let mut headers = Vec::new();
        for (name, value) in &denial.headers {
            headers.push((name.to_string(), value.render(&values, false)));
        }
        Some(DenialResponse {
            status: denial.status,
            content_type: denial.content_type.as_deref().map(str::to_owned),
            message: denial.message.render(&values, denial.is_json()),
            headers,
        })
    }
}
