//! Which class a request belongs to, by rules over its method and path.

use http::{Method, request::Parts};

/// Rules that name a request's class: the first that fits does. Without one, what reads is `get`, all else `post`.
///
/// For [`ShedLayer`](super::ShedLayer), and for the `class` entry of a descriptor:
///
/// ```
/// use sluicegate_client::{descriptor, layer::ClassRules};
///
/// let classes = ClassRules::new().rule("critical", None, "/payments").rule("test", None, "/test/");
/// let descriptors = move |head: &http::request::Parts| {
///     vec![descriptor! { "fleet" => "api", "priority" => classes.of(head).to_owned() }]
/// };
/// # let _ = descriptors;
/// ```
#[derive(Clone, Debug)]
pub struct ClassRules {
    rules: Vec<Rule>,
    reading: String,
    writing: String,
}

#[derive(Clone, Debug)]
struct Rule {
    class: String,
    method: Option<Method>,
    path: String,
}

impl Default for ClassRules {
    fn default() -> Self {
        Self { rules: Vec::new(), reading: "get".into(), writing: "post".into() }
    }
}

impl ClassRules {
    /// Without rules yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Requests with this method, or any, whose path begins like this are of this class.
    #[must_use]
    pub fn rule(mut self, class: impl Into<String>, method: Option<Method>, path: impl Into<String>) -> Self {
        self.rules.push(Rule { class: class.into(), method, path: path.into() });
        self
    }

    /// The classes of requests that no rule fits: of those that read, and of all else.
    #[must_use]
    pub fn others(self, reading: impl Into<String>, writing: impl Into<String>) -> Self {
        Self { reading: reading.into(), writing: writing.into(), ..self }
    }

    /// A request's class.
    #[must_use]
    pub fn of(&self, head: &Parts) -> &str {
        self.class(&head.method, head.uri.path())
    }

    pub(super) fn class(&self, method: &Method, path: &str) -> &str {
        let fits =
            |rule: &&Rule| rule.method.as_ref().is_none_or(|wanted| wanted == method) && path.starts_with(&rule.path);
        match self.rules.iter().find(fits) {
            Some(rule) => &rule.class,
            None if method.is_safe() => &self.reading,
            None => &self.writing,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_rule_that_fits_names_the_class() {
        let rules = ClassRules::new()
            .rule("critical", Some(Method::POST), "/payments")
            .rule("get", None, "/payments")
            .rule("test", None, "/test/");
        assert_eq!(rules.class(&Method::POST, "/payments/7"), "critical");
        assert_eq!(rules.class(&Method::DELETE, "/payments/7"), "get");
        assert_eq!(rules.class(&Method::GET, "/test/payments"), "test");
        let others = |rules: &ClassRules| {
            [Method::PUT, Method::GET, Method::HEAD].map(|method| rules.class(&method, "/").to_owned())
        };
        assert_eq!(others(&rules), ["post", "get", "get"]);
        assert_eq!(others(&rules.others("r", "w")), ["w", "r", "r"]);
    }
}
