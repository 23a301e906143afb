//! `elastic`: above the limit while a resource has capacity to spare.

use super::{
    Reader,
    keywords::{ELASTIC, MAX_PERCENT},
};
use crate::{
    algorithm::{AlgorithmKind, LimitSpec},
    rules::{
        limit::{Limit, LimitError, Measure},
        matcher::Elastic,
        yaml::Yaml,
    },
};

/// Up to this share of its capacity a resource is idle, and from that one on it is busy, if a rule does not say, in percent.
const IDLE: u32 = 50;
const BUSY: u32 = 90;

/// What was read.
pub(super) struct ElasticKeywords {
    resource: String,
    up_to: u32,
    idle: u32,
    busy: u32,
}

impl Reader<'_, '_> {
    pub(super) fn elastic(&mut self, node: &Yaml) -> Option<ElasticKeywords> {
        let (mut resource, mut up_to, mut idle, mut busy) = (None, Some(0), Some(IDLE), Some(BUSY));
        for (key, _, value) in self.map(node, &ELASTIC)? {
            match key {
                "resource" => resource = self.text(key, value).filter(|name| !name.is_empty()),
                "up_to" => up_to = self.percent(key, value, 101, MAX_PERCENT),
                "idle" => idle = self.percent(key, value, 0, 100),
                "busy" => busy = self.percent(key, value, 0, 100),
                _ => {}
            }
        }
        let words = ElasticKeywords { resource: resource.unwrap_or_default(), up_to: up_to?, idle: idle?, busy: busy? };
        if words.resource.is_empty() || words.up_to == 0 {
            self.problems
                .error(node.place, "elastic needs a resource, and up_to: how much of the limit there is at most");
            return None;
        }
        if words.idle >= words.busy {
            self.problems.error(node.place, "a resource is idle below the utilization at which it is busy");
            return None;
        }
        Some(words)
    }
}

/// The limit with more and more above it.
pub(super) fn stretch(
    words: ElasticKeywords,
    requests: u32,
    measure: Measure,
    kind: AlgorithmKind,
    shape: LimitSpec,
) -> Result<Elastic, LimitError> {
    let ElasticKeywords { resource, up_to, idle, busy } = words;
    let stretched = |step: usize| {
        let extra = u64::from(up_to - 100) * step as u64;
        let stretch = |number: u32| {
            let number = u64::from(number);
            u32::try_from(number + number * extra / (100 * Elastic::STEPS as u64)).unwrap_or(u32::MAX)
        };
        let shape = LimitSpec { burst: shape.burst.map(stretch), ..shape };
        Limit::shaped(stretch(requests), measure, kind, shape)
    };
    let steps = (1..=Elastic::STEPS).map(stretched).collect::<Result<_, _>>()?;
    let part = |percent: u32| f64::from(percent) / 100.0;
    Ok(Elastic { resource: resource.into(), idle: part(idle), busy: part(busy), steps })
}
