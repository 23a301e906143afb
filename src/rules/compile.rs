//! From files to a [`RuleSet`]: all or nothing, with every mistake of every file.

use std::{
    collections::{HashMap, HashSet},
    num::NonZeroU32,
    sync::{Arc, OnceLock},
};

use super::{
    diagnostic::{Diagnostic, Diagnostics, Location, Severity},
    limit::Limit,
    matcher::{self, Entities, ModifierEntry, Plan, Rule, RuleSet, Segment},
    spec::{self, Descriptor, File, Plans, RateLimit},
};
use crate::algorithm::Micros;

/// One file of a set.
#[derive(Clone, Debug)]
pub struct SourceFile {
    /// How problems call it.
    pub name: String,
    /// What it says.
    pub text: String,
}

/// Of the limits with the same requests and window, so many are looked at for one that is the same in all else.
const COMPARED: usize = 16;

/// Choices that change what a set of files means.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Several files may name one domain; their descriptors add up.
    pub merge_domains: bool,
    /// Domains that do not say otherwise charge for all limits of a request or for none.
    pub charge_all: bool,
    /// Among so many instances a limit is divided when each has to decide by itself.
    pub instances: NonZeroU32,
}

impl Default for Options {
    fn default() -> Self {
        Self { merge_domains: false, charge_all: false, instances: NonZeroU32::MIN }
    }
}

/// Compiles a set of files. `Ok` brings the warnings along; `Err` has every error, and the warnings.
pub fn compile(files: &[SourceFile], options: Options) -> Result<(RuleSet, Vec<Diagnostic>), Vec<Diagnostic>> {
    let mut list = Vec::new();
    let mut compiler = Compiler {
        set: RuleSet::default(),
        first_file: HashMap::new(),
        limits: HashMap::new(),
        texts: HashSet::new(),
        options,
    };
    for file in files {
        let mut problems = Diagnostics::new(&file.name, &mut list);
        if let Some(spec) = spec::read(&file.text, options, &mut problems) {
            compiler.file(&file.name, &spec, &mut problems);
        }
        problems.sort();
    }
    if list.iter().any(|problem| problem.severity == Severity::Error) {
        return Err(list);
    }
    compiler.set.shrink();
    Ok((compiler.set, list))
}

struct Compiler {
    set: RuleSet,
    /// The file that named a domain first.
    first_file: HashMap<String, Arc<str>>,
    /// By requests and window, to be shared.
    limits: HashMap<(u32, Micros), Vec<Arc<Limit>>>,
    /// Keys and labels, to be shared: those of many levels are the same.
    texts: HashSet<Arc<str>>,
    options: Options,
}

/// What the levels above say of a descriptor.
struct Parent<'a> {
    file: &'a Arc<str>,
    plans: &'a Plans,
    entities: Arc<Entities>,
    parent: u32,
    /// The domain and a label for each level.
    labels: Vec<Arc<str>>,
    dynamic: bool,
}

impl Compiler {
    fn file(&mut self, name: &str, spec: &File, problems: &mut Diagnostics<'_>) {
        let file: Arc<str> = name.into();
        let first = self.first_file.entry(spec.domain.clone()).or_insert_with(|| Arc::clone(&file));
        if !Arc::ptr_eq(first, &file) && !self.options.merge_domains {
            let message =
                format!("domain {:?} is {first}'s already; rules.merge_domains would add the two up", spec.domain);
            problems.error(spec.place, message);
            return;
        }
        let parent = self.set.add_domain(&spec.domain);
        if let Err(first) = self.set.set_domain(&spec.domain, spec.charge_all, &spec.shard_by) {
            let message =
                format!("shard_by of domain {:?} is [{}] in another file: one domain has one", spec.domain, first);
            problems.error(spec.shard_by_place, message);
        }
        let mut entities = Entities::new();
        for ((key, entity), plan) in &spec.plans.entities {
            entities.entry(key.clone()).or_default().insert(entity.clone(), plan.as_str().into());
        }
        let (plans, entities) = (&spec.plans, Arc::new(entities));
        let above =
            Parent { file: &file, plans, entities, parent, labels: vec![spec.domain.as_str().into()], dynamic: false };
        self.descriptors(&spec.descriptors, &above, problems);
    }

    fn descriptors(&mut self, list: &[Descriptor], above: &Parent<'_>, problems: &mut Diagnostics<'_>) {
        for descriptor in list {
            let segment = match &descriptor.value {
                None => Segment::Any,
                Some(value) if descriptor.share_threshold => Segment::Shared(value.as_str().into()),
                Some(value) if value.contains('*') => Segment::Pattern(value.as_str().into()),
                Some(value) => Segment::Value(value.as_str().into()),
            };
            let key = self.text(&descriptor.key);
            match self.set.add_child(above.parent, &key, segment, descriptor.place) {
                Ok(node) => self.level(node, descriptor, above, problems),
                Err(first) => {
                    let value = descriptor.value.as_ref().map(|value| format!(" and value {value:?}"));
                    let message = format!(
                        "the key {:?}{} stands twice in one list; first at line {}",
                        descriptor.key,
                        value.unwrap_or_default(),
                        first.line
                    );
                    problems.error(descriptor.place, message);
                }
            }
        }
    }

    fn level(&mut self, id: u32, descriptor: &Descriptor, above: &Parent<'_>, problems: &mut Diagnostics<'_>) {
        let node = self.set.node_mut(id);
        node.value_to_metric = descriptor.value_to_metric;
        node.ip_prefix = descriptor.ip_prefix;
        let mut labels = above.labels.clone();
        let label = node.label();
        let own_value = matches!(node.segment, Segment::Any | Segment::Pattern(_));
        labels.push(self.text(&label));
        let dynamic = above.dynamic || (descriptor.value_to_metric && own_value);
        if let Some(written) = &descriptor.rate_limit {
            let at = Level { descriptor, above, labels: &labels, dynamic };
            match &written.by_plan {
                None => {
                    let rule = at.rule(self, written);
                    let levels = self.levels(vec![id], &written.asides, descriptor.place, problems);
                    self.set.add_rule(&levels, rule);
                }
                Some((name, place)) => self.by_plan(id, &at, name, *place, problems),
            }
        }
        let below = Parent { parent: id, labels, dynamic, entities: Arc::clone(&above.entities), ..*above };
        self.descriptors(&descriptor.children, &below, problems);
    }

    fn text(&mut self, text: &str) -> Arc<str> {
        if let Some(known) = self.texts.get(text) {
            return Arc::clone(known);
        }
        let new = Arc::from(text);
        self.texts.insert(Arc::clone(&new));
        new
    }

    /// The same limit as another rule's, where there is one.
    fn shared(&mut self, limit: Option<&Limit>) -> Option<Arc<Limit>> {
        let limit = limit?;
        let same = self.limits.entry((limit.requests(), limit.measure().window())).or_default();
        let known = same.iter().rev().take(COMPARED).find(|known| ***known == *limit).cloned();
        Some(known.unwrap_or_else(|| {
            let new = Arc::new(*limit);
            same.push(Arc::clone(&new));
            new
        }))
    }

    /// The levels of the entries that say who asks are below those that choose the counter, the first there, and have no say
    /// in labels.
    fn levels(
        &mut self,
        mut levels: Vec<u32>,
        asides: &[(ModifierEntry, String)],
        place: Location,
        problems: &mut Diagnostics<'_>,
    ) -> Vec<u32> {
        for (aside, key) in asides {
            for level in &mut levels {
                let key = self.text(key);
                match self.set.add_child(*level, &key, Segment::Any, place) {
                    Ok(below) => {
                        self.set.node_mut(below).modifier = Some(*aside);
                        *level = below;
                    }
                    Err(_) => {
                        problems.error(place, format!("the entry {key:?} cannot be the request's plan, and more"));
                    }
                }
            }
        }
        levels
    }

    /// A rule for each plan; requests that name none end on the same level as those that do, less their last entry.
    fn by_plan(&mut self, id: u32, at: &Level<'_>, name: &str, place: Location, problems: &mut Diagnostics<'_>) {
        let plans = at.above.plans;
        let mut limits = Vec::new();
        for (plan, of) in &plans.plans {
            match of.limits.get(name) {
                Some(limit) => limits.push((plan, limit)),
                None => problems.error(
                    of.place,
                    format!("the plan {plan:?} has no limit {name:?}, which line {} wants", place.line),
                ),
            }
        }
        let Some((_, first)) = limits.first() else {
            problems.error(place, format!("there is no plan that could have a limit {name:?}"));
            return;
        };
        if limits.iter().any(|(_, limit)| limit.asides != first.asides) {
            problems.error(place, format!("the limits {name:?} of all plans need the same class and holder"));
            return;
        }
        let named = self.levels(vec![id], &[(ModifierEntry::Plan, plans.key.clone())], place, problems);
        let levels = self.levels([vec![id], named].concat(), &first.asides, place, problems);
        // The default plan's comes last: the levels lead to it.
        limits.sort_by_key(|(plan, _)| **plan == plans.default);
        let next = self.set.rules().len()..;
        let rules = limits.iter().zip(next).map(|((plan, _), rule)| (plan.as_str().into(), rule as u32)).collect();
        let all = Arc::new(matcher::Plans { rules, entities: Arc::clone(&at.above.entities) });
        for (plan, limit) in limits {
            let mut rule = at.rule(self, limit);
            rule.plan = Some(Box::new(Plan::new(plan, &all)));
            let own = self.text(&format!("{}_{plan}", plans.key));
            rule.labels = rule.labels.iter().cloned().chain([own]).collect();
            self.set.add_rule(&levels, rule);
        }
    }
}

/// A descriptor that has a limit.
struct Level<'a> {
    descriptor: &'a Descriptor,
    above: &'a Parent<'a>,
    labels: &'a [Arc<str>],
    dynamic: bool,
}

impl Level<'_> {
    fn rule(&self, compiler: &mut Compiler, written: &RateLimit) -> Rule {
        let Self { descriptor, above, labels, dynamic } = self;
        Rule {
            id: compiler.set.rules().len(),
            limit: compiler.shared(written.limit.as_ref()),
            name: (!written.name.is_empty()).then(|| written.name.as_str().into()),
            policy: OnceLock::new(),
            replaces: written.replaces.clone(),
            shadow_mode: descriptor.shadow_mode,
            quota_mode: descriptor.quota_mode,
            detailed_metric: descriptor.detailed_metric,
            on_error: written.on_error,
            consistency: written.consistency,
            needs_context: !written.asides.is_empty(),
            classes: written.classes.clone().into(),
            sheds: written.sheds,
            elastic: written.elastic.clone().map(Box::new),
            plan: None,
            divided_limit: compiler.shared(written.part.as_ref().filter(|part| Some(**part) != written.limit)),
            metadata: descriptor.metadata.clone(),
            labels: (*labels).into(),
            dynamic_labels: *dynamic || descriptor.detailed_metric,
            file: Arc::clone(above.file),
            place: descriptor.place,
        }
    }
}
