//! [`ElasticKeywords`]: the keywords of `elastic`, a higher limit while a resource has spare capacity.

use sluicegate_algorithm::{AlgorithmKind, LimitSpec, bound_hits};

use super::{
    Reader,
    keywords::{ELASTIC, MAX_PERCENT},
};
use crate::{
    limit::{Limit, LimitError, Measure},
    matcher::Elastic,
    yaml::Yaml,
};

/// Default of `idle`: utilization in percent up to which the highest limit applies.
const DEFAULT_IDLE: u32 = 50;
/// Default of `busy`: utilization in percent from which only the rule's own limit applies.
const DEFAULT_BUSY: u32 = 90;

/// The values of the keywords of `elastic`; the numbers are percentages.
pub(super) struct ElasticKeywords {
    resource: String,
    up_to: u32,
    idle: u32,
    busy: u32,
}

impl Reader<'_, '_> {
    pub(super) fn elastic(&mut self, node: &Yaml) -> Option<ElasticKeywords> {
        let mut resource = None;
        let mut up_to = Some(0);
        let mut idle = Some(DEFAULT_IDLE);
        let mut busy = Some(DEFAULT_BUSY);
        for (key, _, value) in self.read_map("elastic", node, &ELASTIC)? {
            match key {
                "resource" => resource = self.text(key, value).filter(|name| !name.is_empty()),
                "up_to" => up_to = self.percent(key, value, 101, MAX_PERCENT),
                "idle" => idle = self.percent(key, value, 0, 100),
                "busy" => busy = self.percent(key, value, 0, 100),
                _ => {}
            }
        }
        let keywords =
            ElasticKeywords { resource: resource.unwrap_or_default(), up_to: up_to?, idle: idle?, busy: busy? };
        if keywords.resource.is_empty() || keywords.up_to == 0 {
            self.diagnostics.error(node.location, "elastic requires resource and up_to");
            return None;
        }
        if keywords.idle >= keywords.busy {
            self.diagnostics.error(node.location, "idle must be less than busy");
            return None;
        }
        Some(keywords)
    }
}

/// Builds the limits above the rule's own limit in [`Elastic::STEPS`] steps.
pub(super) fn build_elastic(
    keywords: ElasticKeywords,
    requests: u64,
    measure: Measure,
    kind: AlgorithmKind,
    spec: LimitSpec,
) -> Result<Elastic, LimitError> {
    let ElasticKeywords { resource, up_to, idle, busy } = keywords;
    let mut steps = Vec::with_capacity(Elastic::STEPS);
    for step in 1..=Elastic::STEPS {
        let extra = u64::from(up_to - 100) * step as u64;
        let spec = LimitSpec { burst: spec.burst.map(|burst| add_extra(burst, extra)), ..spec };
        steps.push(Limit::from_spec(add_extra(requests, extra), measure, kind, spec)?);
    }
    Ok(Elastic {
        resource: resource.into(),
        idle: f64::from(idle) / 100.0,
        busy: f64::from(busy) / 100.0,
        steps: steps.into(),
    })
}

/// Returns a number increased by `extra` / [`Elastic::STEPS`] percent, rounded down.
fn add_extra(number: u64, extra: u64) -> u64 {
    let increased =
        u128::from(number) * u128::from(100 * Elastic::STEPS as u64 + extra) / (100 * Elastic::STEPS as u128);
    bound_hits(u64::try_from(increased).unwrap_or(u64::MAX))
}
