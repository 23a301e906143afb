//! [`ClassRules`]: maps requests to classes by method and path.

use http::{Method, request::Parts};

/// Rules that map a request to a class. The first matching rule applies.
///
/// Without a matching rule, requests with a safe method (`GET`, `HEAD`, ...) are in the class `get`, all others in
/// `post`. The rules are used by [`ShedLayer`](super::ShedLayer), and can supply the `class` entry of a descriptor.
///
/// # Examples
///
/// ```
/// use sluicegate_client::{descriptor, layer::ClassRules};
///
/// let classes = ClassRules::new().rule("critical", None, "/payments").rule("test", None, "/test/");
/// let descriptors = move |head: &http::request::Parts| {
///     vec![descriptor! { "fleet" => "api", "priority" => classes.classify(head).to_owned() }]
/// };
/// # let _ = descriptors;
/// ```
#[derive(Clone, Debug)]
pub struct ClassRules {
    rules: Vec<Rule>,
    safe_class: String,
    other_class: String,
}

#[derive(Clone, Debug)]
struct Rule {
    class: String,
    method: Option<Method>,
    path: String,
}

impl Rule {
    fn matches(&self, method: &Method, path: &str) -> bool {
        self.method.as_ref().is_none_or(|expected| expected == method) && path.starts_with(&self.path)
    }
}

impl Default for ClassRules {
    fn default() -> Self {
        Self { rules: Vec::new(), safe_class: "get".into(), other_class: "post".into() }
    }
}

impl ClassRules {
    /// Creates an empty list of rules.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a rule: requests with this method (any method if `None`), and a path that starts with `path`, are in
    /// `class`.
    #[must_use]
    pub fn rule(mut self, class: impl Into<String>, method: Option<Method>, path: impl Into<String>) -> Self {
        self.rules.push(Rule { class: class.into(), method, path: path.into() });
        self
    }

    /// Sets the classes of requests that no rule matches: those with a safe method (RFC 9110), and all others.
    #[must_use]
    pub fn default_classes(self, safe: impl Into<String>, other: impl Into<String>) -> Self {
        Self { safe_class: safe.into(), other_class: other.into(), ..self }
    }

    /// Returns the class of a request.
    #[must_use]
    pub fn classify(&self, head: &Parts) -> &str {
        self.class_for(&head.method, head.uri.path())
    }

    pub(super) fn class_for(&self, method: &Method, path: &str) -> &str {
        match self.rules.iter().find(|rule| rule.matches(method, path)) {
            Some(rule) => &rule.class,
            None if method.is_safe() => &self.safe_class,
            None => &self.other_class,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_matching_rule_determines_the_class() {
        let rules = ClassRules::new()
            .rule("critical", Some(Method::POST), "/payments")
            .rule("get", None, "/payments")
            .rule("test", None, "/test/");
        assert_eq!(rules.class_for(&Method::POST, "/payments/7"), "critical");
        assert_eq!(rules.class_for(&Method::DELETE, "/payments/7"), "get");
        assert_eq!(rules.class_for(&Method::GET, "/test/payments"), "test");
        let defaults = |rules: &ClassRules| {
            [Method::PUT, Method::GET, Method::HEAD].map(|method| rules.class_for(&method, "/").to_owned())
        };
        assert_eq!(defaults(&rules), ["post", "get", "get"]);
        assert_eq!(defaults(&rules.default_classes("r", "w")), ["w", "r", "r"]);
    }

    #[test]
    fn the_head_of_a_request_determines_its_class() {
        let rules = ClassRules::new().rule("critical", Some(Method::POST), "/payments");
        let (head, ()) = http::Request::post("/payments/7?x=1").body(()).unwrap().into_parts();
        assert_eq!(rules.classify(&head), "critical");
    }
}
