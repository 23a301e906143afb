//! From files to a [`RuleSet`]: all or nothing, with every mistake of every file.

use std::{collections::HashMap, num::NonZeroU32, sync::Arc};

use super::{
    matcher::{Rule, RuleSet, Segment},
    problem::{Problem, Problems, Severity},
    spec::{self, Descriptor, File},
};

/// One file of a set.
#[derive(Clone, Debug)]
pub struct SourceFile {
    /// How problems call it.
    pub name: String,
    /// What it says.
    pub text: String,
}

/// Choices that change what a set of files means.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Several files may name one domain; their descriptors add up.
    pub merge_domains: bool,
    /// Among so many instances a limit is divided when each has to decide by itself.
    pub instances: NonZeroU32,
}

impl Default for Options {
    fn default() -> Self {
        Self { merge_domains: false, instances: NonZeroU32::MIN }
    }
}

/// Compiles a set of files. `Ok` brings the warnings along; `Err` has every error, and the warnings.
pub fn compile(files: &[SourceFile], options: Options) -> Result<(RuleSet, Vec<Problem>), Vec<Problem>> {
    let mut list = Vec::new();
    let mut compiler = Compiler { set: RuleSet::default(), first_file: HashMap::new(), options };
    for file in files {
        let mut problems = Problems::new(&file.name, &mut list);
        if let Some(spec) = spec::read(&file.text, options, &mut problems) {
            compiler.file(&file.name, &spec, &mut problems);
        }
        problems.sort();
    }
    if list.iter().any(|problem| problem.severity == Severity::Error) { Err(list) } else { Ok((compiler.set, list)) }
}

struct Compiler {
    set: RuleSet,
    /// The file that named a domain first.
    first_file: HashMap<String, Arc<str>>,
    options: Options,
}

/// What the levels above say of a descriptor.
struct Above<'a> {
    file: &'a Arc<str>,
    parent: u32,
    /// The domain and a label for each level.
    labels: Vec<String>,
    dynamic: bool,
}

impl Compiler {
    fn file(&mut self, name: &str, spec: &File, problems: &mut Problems<'_>) {
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
        let above = Above { file: &file, parent, labels: vec![spec.domain.clone()], dynamic: false };
        self.descriptors(&spec.descriptors, &above, problems);
    }

    fn descriptors(&mut self, list: &[Descriptor], above: &Above<'_>, problems: &mut Problems<'_>) {
        for descriptor in list {
            let segment = match &descriptor.value {
                None => Segment::Any,
                Some(value) if descriptor.share_threshold => Segment::Shared(value.as_str().into()),
                Some(value) if value.contains('*') => Segment::Pattern(value.as_str().into()),
                Some(value) => Segment::Value(value.as_str().into()),
            };
            match self.set.add_child(above.parent, &descriptor.key, segment, descriptor.place) {
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

    fn level(&mut self, id: u32, descriptor: &Descriptor, above: &Above<'_>, problems: &mut Problems<'_>) {
        let node = self.set.node_mut(id);
        node.value_to_metric = descriptor.value_to_metric;
        node.ip_prefix = descriptor.ip_prefix;
        let mut labels = above.labels.clone();
        labels.push(node.label());
        let own_value = matches!(node.segment, Segment::Any | Segment::Pattern(_));
        let dynamic = above.dynamic || (descriptor.value_to_metric && own_value);
        if let Some(written) = &descriptor.rate_limit {
            // The level of the holders is below, the first there, and has no say in labels.
            let holders = written.holder.as_ref();
            let holders = holders.and_then(|key| self.set.add_child(id, key, Segment::Any, descriptor.place).ok());
            let rule = Rule {
                id: self.set.rules().len(),
                limit: written.limit,
                name: (!written.name.is_empty()).then(|| written.name.as_str().into()),
                policy: match written.name.as_str() {
                    "" => labels[1..].join(".").into(),
                    name => name.into(),
                },
                replaces: written.replaces.clone(),
                shadow_mode: descriptor.shadow_mode,
                quota_mode: descriptor.quota_mode,
                detailed_metric: descriptor.detailed_metric,
                on_error: written.on_error,
                consistency: written.consistency,
                has_holder: written.holder.is_some(),
                part: written.part.filter(|part| Some(*part) != written.limit).map(Box::new),
                metadata: descriptor.metadata.clone(),
                labels: labels.clone(),
                dynamic_labels: dynamic || descriptor.detailed_metric,
                file: Arc::clone(above.file),
                place: descriptor.place,
            };
            self.set.add_rule(holders.unwrap_or(id), rule);
        }
        let below = Above { file: above.file, parent: id, labels, dynamic };
        self.descriptors(&descriptor.children, &below, problems);
    }
}
