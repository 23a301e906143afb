//! [`compile`]: builds a [`RuleSet`] from rule files, or reports every mistake of every file.

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, OnceLock},
};

use sluicegate_algorithm::Micros;

use super::{
    diagnostic::{Diagnostic, Diagnostics, Location, Severity},
    limit::Limit,
    matcher::{self, ModifierEntry, Plan, PlanAssignments, Rule, RuleSet, Segment},
    options::Options,
    replaced::{self, Replaced},
    spec::{self, Descriptor, File, Plans, RateLimit},
    unreachable,
};

/// The name and text of one rule file.
#[derive(Clone, Debug)]
pub struct SourceFile {
    /// Name of the file in diagnostics.
    pub name: String,
    /// Content of the file.
    pub text: String,
}

/// Maximum number of limits with the same requests and window that are compared to find an equal limit.
const MAX_COMPARED_LIMITS: usize = 16;

/// Maximum number of descriptors that are searched for the first of two with the same key and value.
const MAX_COMPARED_DESCRIPTORS: usize = 10_000;

/// Compiles rule files into a rule set, and returns it with the warnings and notes.
///
/// # Errors
///
/// Returns every error and warning of every file if there is at least one error.
pub fn compile(files: &[SourceFile], options: Options) -> Result<(RuleSet, Vec<Diagnostic>), Vec<Diagnostic>> {
    let mut list = Vec::new();
    let mut compiler = Compiler {
        set: RuleSet::default(),
        first_file: HashMap::new(),
        limits: HashMap::new(),
        interned: HashSet::new(),
        replaced: Vec::new(),
        options,
    };
    for file in files {
        let mut diagnostics = Diagnostics::new(&file.name, &mut list);
        if let Some(spec) = spec::read(&file.text, options, &mut diagnostics) {
            compiler.compile_file(&file.name, &spec, &mut diagnostics);
        }
        diagnostics.sort();
    }
    if list.iter().any(|diagnostic| diagnostic.severity == Severity::Error) {
        return Err(list);
    }
    let unknown = replaced::unknown_names(&compiler.set, compiler.replaced);
    if !unknown.is_empty() {
        list.extend(unknown);
        let mut order = HashMap::new();
        for (index, file) in files.iter().enumerate() {
            order.insert(file.name.as_str(), index);
        }
        list.sort_by_key(|diagnostic| (order.get(diagnostic.file.as_str()).copied(), diagnostic.location));
    }
    compiler.set.shrink();
    Ok((compiler.set, list))
}

/// Returns whether the descriptor at `index` has a limit with another measure, such as another window, than an earlier
/// descriptor with the same key and value.
fn is_second_limit(list: &[Descriptor], index: usize) -> bool {
    // The time for all descriptors of a list is quadratic.
    if index > MAX_COMPARED_DESCRIPTORS {
        return false;
    }
    let descriptor = &list[index];
    let Some(second) = descriptor.rate_limit.as_deref().and_then(|rate_limit| rate_limit.limit) else {
        return false;
    };
    let mut earlier = list[..index].iter();
    let first = earlier.find(|earlier| earlier.key == descriptor.key && earlier.value == descriptor.value);
    let first = first.and_then(|first| first.rate_limit.as_deref()?.limit);
    first.is_some_and(|first| first.measure() != second.measure())
}

struct Compiler {
    set: RuleSet,
    /// The file that defined each domain first.
    first_file: HashMap<String, Arc<str>>,
    /// Limits by requests and window, so that equal limits share memory.
    limits: HashMap<(u64, Micros), Vec<Arc<Limit>>>,
    /// Keys and labels, which are shared because many levels have the same ones.
    interned: HashSet<Arc<str>>,
    /// The names in all `replaces`.
    replaced: Vec<Replaced>,
    options: Options,
}

/// Properties that a list of descriptors inherits from the levels above.
struct Parent<'a> {
    file: &'a Arc<str>,
    plans: &'a Plans,
    entities: Arc<PlanAssignments>,
    node: u32,
    /// The domain and a label for each level.
    labels: Vec<Arc<str>>,
    dynamic: bool,
}

impl Compiler {
    fn compile_file(&mut self, name: &str, spec: &File, diagnostics: &mut Diagnostics<'_>) {
        let file: Arc<str> = name.into();
        let first = self.first_file.entry(spec.domain.clone()).or_insert_with(|| Arc::clone(&file));
        if !Arc::ptr_eq(first, &file) && !self.options.merge_domains {
            let message = format!(
                "domain {:?} is already defined in {first}; set rules.merge_domains to combine the files",
                spec.domain
            );
            diagnostics.error(spec.domain_location, message);
            return;
        }
        let root = self.set.add_domain(&spec.domain);
        if let Err(first) = self.set.set_domain(&spec.domain, spec.charge_all, &spec.shard_by) {
            let message = format!(
                "shard_by of domain {:?} is [{first}] in another file; all files of a domain must agree",
                spec.domain
            );
            diagnostics.error(spec.shard_by_location, message);
        }
        let mut entities = PlanAssignments::new();
        for ((key, entity), assignment) in &spec.plans.entities {
            entities.entry(key.clone()).or_default().insert(entity.clone(), assignment.clone());
        }
        let parent = Parent {
            file: &file,
            plans: &spec.plans,
            entities: Arc::new(entities),
            node: root,
            labels: vec![spec.domain.as_str().into()],
            dynamic: false,
        };
        self.compile_descriptors(&spec.descriptors, &parent, diagnostics);
    }

    fn compile_descriptors(&mut self, list: &[Descriptor], parent: &Parent<'_>, diagnostics: &mut Diagnostics<'_>) {
        unreachable::warn_about_hidden_levels(list, diagnostics);
        for (index, descriptor) in list.iter().enumerate() {
            let segment = match &descriptor.value {
                None => Segment::Any,
                Some(value) if descriptor.share_threshold => Segment::Shared(value.as_str().into()),
                Some(value) if value.contains('*') => Segment::Pattern(value.as_str().into()),
                Some(value) => Segment::Value(value.as_str().into()),
            };
            let key = self.intern(&descriptor.key);
            if let Segment::Pattern(pattern) | Segment::Shared(pattern) = &segment {
                let earlier = self.set.covering_pattern(parent.node, &key, pattern);
                if let Some(earlier) = earlier.filter(|earlier| *earlier != &**pattern) {
                    unreachable::warn_about_pattern(pattern, earlier, descriptor.location, diagnostics);
                }
            }
            match self.set.add_child(parent.node, &key, segment, descriptor.location) {
                Ok(node) => self.compile_descriptor(node, descriptor, parent, diagnostics),
                Err(first) => {
                    let value = descriptor.value.as_ref().map(|value| format!(" and value {value:?}"));
                    let hint = if is_second_limit(list, index) {
                        "; for two limits on the same value, such as per minute and per day, replace rate_limit by \
                         rate_limits, a list of limits, of which each after the first has a name"
                    } else {
                        ""
                    };
                    let message = format!(
                        "duplicate descriptor with key {:?}{}; first defined at line {}{hint}",
                        descriptor.key,
                        value.unwrap_or_default(),
                        first.line
                    );
                    diagnostics.error(descriptor.location, message);
                }
            }
        }
    }

    fn compile_descriptor(
        &mut self,
        id: u32,
        descriptor: &Descriptor,
        parent: &Parent<'_>,
        diagnostics: &mut Diagnostics<'_>,
    ) {
        let node = self.set.node_mut(id);
        node.value_to_metric = descriptor.value_to_metric;
        node.ip_prefix = descriptor.ip_prefix;
        let mut labels = parent.labels.clone();
        let label = node.label();
        let is_per_value = matches!(node.segment, Segment::Any | Segment::Pattern(_));
        labels.push(self.intern(&label));
        let dynamic = parent.dynamic || (descriptor.value_to_metric && is_per_value);
        if let Some(rate_limit) = &descriptor.rate_limit {
            let limited = LimitedDescriptor { descriptor, parent, labels: &labels, dynamic };
            match &rate_limit.by_plan {
                None => {
                    let rule = limited.build_rule(self, rate_limit);
                    let levels =
                        self.add_modifier_levels(vec![id], &rate_limit.modifiers, descriptor.location, diagnostics);
                    let levels = self.add_cost_levels(levels, rate_limit, descriptor.location, diagnostics);
                    let head = self.set.add_rule(&levels, rule);
                    self.add_further_limits(head, &limited, rate_limit);
                }
                Some((name, location)) => {
                    if descriptor.key == parent.plans.key {
                        let message = format!(
                            "the plan is an entry of its own after the key {:?}, so each request gets the default plan; \
                             a rule with by_plan has no level for the plan",
                            descriptor.key
                        );
                        diagnostics.warning(descriptor.location, message);
                    }
                    self.add_plan_rules(id, &limited, name, *location, diagnostics);
                }
            }
        }
        let child = Parent { node: id, labels, dynamic, entities: Arc::clone(&parent.entities), ..*parent };
        self.compile_descriptors(&descriptor.children, &child, diagnostics);
    }

    fn intern(&mut self, text: &str) -> Arc<str> {
        if let Some(known) = self.interned.get(text) {
            return Arc::clone(known);
        }
        let new = Arc::from(text);
        self.interned.insert(Arc::clone(&new));
        new
    }

    /// Returns an equal limit of another rule if one is found, otherwise a new one.
    fn intern_limit(&mut self, limit: Option<&Limit>) -> Option<Arc<Limit>> {
        let limit = limit?;
        let same = self.limits.entry((limit.requests(), limit.measure().window())).or_default();
        let known = same.iter().rev().take(MAX_COMPARED_LIMITS).find(|known| ***known == *limit).cloned();
        Some(known.unwrap_or_else(|| {
            let new = Arc::new(*limit);
            same.push(Arc::clone(&new));
            new
        }))
    }

    /// Adds one level per modifier entry below each of `levels`, and returns the lowest levels.
    ///
    /// Modifier entries come after the entries that select the counter, and they are not part of labels.
    fn add_modifier_levels(
        &mut self,
        mut levels: Vec<u32>,
        modifiers: &[(ModifierEntry, String)],
        location: Location,
        diagnostics: &mut Diagnostics<'_>,
    ) -> Vec<u32> {
        for (modifier, key) in modifiers {
            for level in &mut levels {
                let key = self.intern(key);
                match self.set.add_child(*level, &key, Segment::Any, location) {
                    Ok(child) => {
                        self.set.node_mut(child).modifier = Some(*modifier);
                        *level = child;
                    }
                    Err(_) => {
                        diagnostics.error(
                            location,
                            format!("the entry {key:?} cannot be both the plan and the class, holder or cost"),
                        );
                    }
                }
            }
        }
        levels
    }

    /// Adds a level below each of `levels` for the entry that selects the cost of a hit, and returns all of them: requests
    /// may have the entry or not.
    fn add_cost_levels(
        &mut self,
        mut levels: Vec<u32>,
        rate_limit: &RateLimit,
        location: Location,
        diagnostics: &mut Diagnostics<'_>,
    ) -> Vec<u32> {
        if let Some(key) = rate_limit.all().find_map(RateLimit::cost_key) {
            let modifiers = [(ModifierEntry::Cost, key.to_owned())];
            let with_cost = self.add_modifier_levels(levels.clone(), &modifiers, location, diagnostics);
            levels.extend(with_cost);
        }
        levels
    }

    /// Adds one rule per plan.
    ///
    /// Requests without a plan entry end on the level of the descriptor, and requests with one end on a level below it.
    /// Both levels lead to the rule of the default plan, from which [`RuleSet::find`] selects the request's plan.
    fn add_plan_rules(
        &mut self,
        id: u32,
        limited: &LimitedDescriptor<'_>,
        name: &str,
        location: Location,
        diagnostics: &mut Diagnostics<'_>,
    ) {
        let plans = limited.parent.plans;
        let mut limits = Vec::new();
        for (plan, definition) in &plans.plans {
            match definition.limits.get(name) {
                Some(limit) => limits.push((plan, limit)),
                None => diagnostics.error(
                    definition.location,
                    format!("the plan {plan:?} does not define the limit {name:?}, which line {} uses", location.line),
                ),
            }
        }
        let Some((_, first)) = limits.first() else {
            diagnostics.error(location, format!("no plan defines the limit {name:?}"));
            return;
        };
        if limits.iter().any(|(_, limit)| limit.modifiers != first.modifiers) {
            diagnostics.error(location, format!("the limit {name:?} must have the same class and holder in all plans"));
            return;
        }
        let plan_levels =
            self.add_modifier_levels(vec![id], &[(ModifierEntry::Plan, plans.key.clone())], location, diagnostics);
        let levels =
            self.add_modifier_levels([vec![id], plan_levels].concat(), &first.modifiers, location, diagnostics);
        let with_cost =
            limits.iter().map(|(_, limit)| limit).find(|limit| limit.all().any(|limit| limit.cost_key().is_some()));
        let levels = self.add_cost_levels(levels, with_cost.unwrap_or(first), location, diagnostics);
        // The rule that is added last is the one that the levels lead to.
        limits.sort_by_key(|(plan, _)| **plan == plans.default);
        let first_id = self.set.rules().len();
        let mut rules = HashMap::new();
        for (index, (plan, _)) in limits.iter().enumerate() {
            rules.insert(plan.as_str().into(), (first_id + index) as u32);
        }
        let plan_rules = Arc::new(matcher::Plans { rules, entities: Arc::clone(&limited.parent.entities) });
        let mut heads = Vec::new();
        for (plan, limit) in &limits {
            let mut rule = limited.build_rule(self, limit);
            rule.plan = Some(Box::new(Plan::new(plan, &plan_rules)));
            set_plan_of_denial(&mut rule);
            let plan_label = self.intern(&format!("{}_{plan}", plans.key));
            rule.labels = rule.labels.iter().cloned().chain([plan_label]).collect();
            heads.push(self.set.add_rule(&levels, rule));
        }
        // The ids of the first limits follow one another.
        for (head, (_, limit)) in heads.into_iter().zip(limits) {
            self.add_further_limits(head, limited, limit);
        }
    }

    /// Adds the further limits of a rule. Their names are in their labels, before the plan.
    fn add_further_limits(&mut self, head: u32, limited: &LimitedDescriptor<'_>, rate_limit: &RateLimit) {
        let mut further = Vec::new();
        for limit in &rate_limit.further {
            let mut rule = limited.build_rule(self, limit);
            rule.is_further = true;
            rule.plan = self.set.rule_mut(head).plan.clone();
            set_plan_of_denial(&mut rule);
            let mut labels = self.set.rule_mut(head).labels.to_vec();
            let plan_label = if rule.plan.is_some() { labels.pop() } else { None };
            labels.push(self.intern(&limit.name));
            labels.extend(plan_label);
            rule.labels = labels.into();
            further.push(self.set.add_rule(&[], rule));
        }
        self.set.rule_mut(head).further = further.into();
    }
}

/// Sets the plan of a rule's denial.
fn set_plan_of_denial(rule: &mut Rule) {
    if let (Some(denial), Some(plan)) = (&mut rule.denial, &rule.plan) {
        Arc::make_mut(denial).plan = plan.name.clone();
    }
}

/// A descriptor with a limit, and the properties of the levels above.
struct LimitedDescriptor<'a> {
    descriptor: &'a Descriptor,
    parent: &'a Parent<'a>,
    labels: &'a [Arc<str>],
    dynamic: bool,
}

impl LimitedDescriptor<'_> {
    fn build_rule(&self, compiler: &mut Compiler, rate_limit: &RateLimit) -> Rule {
        let Self { descriptor, parent, labels, dynamic } = self;
        for replaced in &rate_limit.replaces {
            compiler.replaced.push(Replaced {
                file: Arc::clone(parent.file),
                domain: Arc::clone(&labels[0]),
                limit: replaced.clone(),
            });
        }
        Rule {
            id: compiler.set.rules().len(),
            limit: compiler.intern_limit(rate_limit.limit.as_ref()),
            further: Box::default(),
            is_further: false,
            name: if rate_limit.name.is_empty() { None } else { Some(rate_limit.name.as_str().into()) },
            policy: OnceLock::new(),
            replaces: rate_limit.replaces.iter().map(|replaced| replaced.name.clone()).collect(),
            shadow_mode: descriptor.shadow_mode,
            quota_mode: descriptor.quota_mode,
            detailed_metric: descriptor.detailed_metric,
            on_error: rate_limit.on_error,
            consistency: rate_limit.consistency,
            needs_context: !rate_limit.modifiers.is_empty(),
            classes: rate_limit.classes.clone().into(),
            sheds: rate_limit.sheds,
            is_hidden: rate_limit.is_hidden,
            retry_jitter: rate_limit.retry_jitter,
            denial: rate_limit.denial.clone().map(Arc::new),
            cost_per_hit: rate_limit.cost_per_hit.clone().map(Arc::new),
            currency: rate_limit.currency.clone().map(Box::new),
            elastic: rate_limit.elastic.clone().map(Box::new),
            plan: None,
            divided_limit: compiler
                .intern_limit(rate_limit.divided_limit.as_ref().filter(|divided| Some(**divided) != rate_limit.limit)),
            metadata: descriptor.metadata.clone(),
            labels: (*labels).into(),
            dynamic_labels: *dynamic || descriptor.detailed_metric,
            file: Arc::clone(parent.file),
            location: descriptor.location,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use super::*;

    fn compile_texts(texts: &[&str], options: Options) -> Result<RuleSet, Vec<String>> {
        let named = (1..).zip(texts).map(|(number, text)| (format!("{number}.yaml"), (*text).to_owned()));
        let files: Vec<_> = named.map(|(name, text)| SourceFile { name, text }).collect();
        match compile(&files, options) {
            Ok((set, _)) => Ok(set),
            Err(diagnostics) => Err(diagnostics.iter().map(ToString::to_string).collect()),
        }
    }

    #[test]
    fn labels_are_dynamic_if_a_level_puts_values_into_the_statistics() {
        let text = "
domain: d
descriptors:
- {key: plain, rate_limit: {unit: day, requests_per_unit: 1}}
- {key: detailed, detailed_metric: true, rate_limit: {unit: day, requests_per_unit: 1}}
- {key: fixed, value: v, value_to_metric: true, rate_limit: {unit: day, requests_per_unit: 1}}
- {key: pattern, value: v*, value_to_metric: true, rate_limit: {unit: day, requests_per_unit: 1}}
- key: any
  value_to_metric: true
  descriptors: [{key: child, rate_limit: {unit: day, requests_per_unit: 1}}]
";
        let set = compile_texts(&[text], Options::default()).unwrap();
        let dynamic = set.rules().iter().filter(|rule| rule.dynamic_labels).map(Rule::path).collect::<Vec<_>>();
        assert_eq!(dynamic, ["d.detailed", "d.pattern_v*", "d.any.child"]);
        assert_eq!(set.rules().len(), 5);
    }

    #[test]
    fn decisions_depend_on_the_context_if_the_limit_has_holders_or_classes() {
        let text = "
domain: d
descriptors:
- {key: plain, rate_limit: {unit: day, requests_per_unit: 1}}
- {key: held, rate_limit: {algorithm: concurrency, limit: 1, holder: id}}
- {key: shared, rate_limit: {capacity: 10/s, class: c, reserve: {a: 10%}}}
";
        let set = compile_texts(&[text], Options::default()).unwrap();
        let needs_context: Vec<_> = set.rules().iter().map(|rule| rule.needs_context).collect();
        assert_eq!(needs_context, [false, true, true]);
    }

    #[test]
    fn a_rule_has_the_share_of_an_instance_unless_that_is_the_whole_limit() {
        let text = "
domain: d
descriptors:
- {key: a, rate_limit: {unit: day, requests_per_unit: 10}}
- {key: b, rate_limit: {unit: day, requests_per_unit: 1}}
";
        let shares = |instances| {
            let options = Options { instances: NonZeroU32::new(instances).unwrap(), ..Options::default() };
            let set = compile_texts(&[text], options).unwrap();
            let share = |rule: &Rule| rule.divided_limit.as_ref().map(|limit| limit.requests());
            set.rules().iter().map(share).collect::<Vec<_>>()
        };
        assert_eq!(shares(3), [Some(4), None]);
        assert_eq!(shares(1), [None, None]);
    }

    #[test]
    fn the_files_of_a_domain_that_have_shard_by_must_agree() {
        let options = Options { merge_domains: true, ..Options::default() };
        let user = "domain: d\nshard_by: [user]\n";
        let none = "domain: d\ncharge: all\n";
        for texts in [[user, user], [user, none], [none, user]] {
            let set = compile_texts(&texts, options).unwrap();
            assert_eq!(set.settings_of("d").unwrap().shard_by.join(", "), "user", "{texts:?}");
        }
        assert_eq!(
            compile_texts(&[user, "domain: d\nshard_by: [tenant]\n"], options).err().unwrap(),
            ["2.yaml:2:1: shard_by of domain \"d\" is [user] in another file; all files of a domain must agree"]
        );
    }

    #[test]
    fn domains_are_counted_without_their_levels() {
        let texts = ["domain: a\ndescriptors: [{key: x, descriptors: [{key: z}]}, {key: y}]\n", "domain: b\n"];
        let set = compile_texts(&texts, Options::default()).unwrap();
        assert_eq!((set.has_domains(), set.domains()), (true, 2));
        let empty = compile_texts(&[], Options::default()).unwrap();
        assert_eq!((empty.has_domains(), empty.domains()), (false, 0));
    }
}
