//! The first example of each document about the client denies requests with the rules next to it.

use std::fs;

use sluicegate_client::{Client, Descriptor};

use crate::support::{DEADLINE, Server, repository, rules};

/// Highest number of checks after which the example must deny one.
const MAX_CHECKS: usize = 200;

/// Returns the text between `start` and `end`.
fn between<'t>(text: &'t str, start: &str, end: &str) -> Option<&'t str> {
    let (_, rest) = text.split_once(start)?;
    rest.split_once(end).map(|(found, _)| found)
}

/// Returns the code blocks of a page in a language that begins with `language`.
fn blocks<'t>(page: &'t str, language: &str) -> Vec<&'t str> {
    let code = page.split("```").skip(1).step_by(2);
    code.filter_map(|block| block.strip_prefix(language)?.split_once('\n')).map(|(_, text)| text).collect()
}

#[tokio::test]
async fn the_first_example_of_each_document_denies_with_the_rules_beside_it() {
    for page in ["README.md", "client/README.md", "docs/guides/rust.md"] {
        let text = fs::read_to_string(repository(page)).unwrap();
        let code = blocks(&text, "").into_iter().find(|block| block.contains("Client::builder")).unwrap();
        let domain = between(code, ".domain(\"", "\"").unwrap();
        let key = between(code, "descriptor! { \"", "\"").unwrap();
        let rule_file = blocks(&text, "yaml").into_iter().find(|block| block.starts_with("domain:"));
        let folder = rules(&[("rules.yaml", rule_file.unwrap_or_else(|| panic!("{page} has no rule file")))]);
        let server = Server::start(folder.path(), "memory");
        let client = Client::builder(format!("http://{}", server.grpc)).domain(domain).timeout(DEADLINE);
        let client = client.connect_lazy().unwrap();
        let mut allowed = 0;
        let denied = loop {
            let verdict = client.check([Descriptor::new().entry(key, "alice")]).await;
            assert!(verdict.matched(), "{page}: {verdict:?}");
            if !verdict.allowed() {
                break verdict;
            }
            allowed += 1;
            assert!(allowed < MAX_CHECKS, "{page}: {verdict:?}");
        };
        assert!(allowed > 0, "{page}: the first check must be allowed");
        let names: Vec<_> = denied.headers().iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["RateLimit-Policy", "RateLimit", "Retry-After"], "{page}");
    }
}

/// The rules of the examples are those that the client's documents show.
#[test]
fn the_rules_of_the_examples_are_those_of_the_documents() {
    let file = fs::read_to_string(repository("client/examples/rules/api.yaml")).unwrap();
    for page in ["client/README.md", "docs/guides/rust.md"] {
        let text = fs::read_to_string(repository(page)).unwrap();
        assert!(blocks(&text, "yaml").contains(&file.as_str()), "{page}");
    }
}
