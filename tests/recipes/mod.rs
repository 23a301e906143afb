//! Pages of the book by task: their rule files, configurations of Envoy and commands work as written.

/// Budgets in money for tokens of language models.
mod ai_budget;
/// The Rust parts of the pages.
mod client;
/// A database for Envoy's geoip filter.
mod country_database;
/// Rule files of `deploy/examples`.
mod examples;
/// Runs a page.
mod page;

#[test]
fn troubleshooting() {
    page::run("docs/guides/troubleshooting.md");
}

#[test]
fn frequent_questions() {
    page::run("docs/guides/faq.md");
}

#[test]
fn keywords() {
    page::run("docs/reference/keyword-examples.md");
}

#[test]
fn plans() {
    page::run("docs/guides/recipes/plans.md");
}

#[test]
fn login() {
    page::run("docs/guides/recipes/login.md");
}

#[test]
fn sign_up() {
    page::run("docs/guides/recipes/sign-up.md");
}

#[test]
fn export_jobs() {
    page::run("docs/guides/recipes/export-jobs.md");
}

#[test]
fn webhook_senders() {
    page::run("docs/guides/recipes/webhook-senders.md");
}

#[test]
fn ai_budgets() {
    page::run("docs/guides/recipes/ai-budgets.md");
}

#[test]
fn llm_tokens() {
    page::run("docs/guides/recipes/llm-tokens.md");
}

#[test]
fn one_login() {
    page::run("docs/guides/recipes/one-login.md");
}

#[test]
fn country() {
    page::run("docs/guides/recipes/country.md");
}

#[test]
fn registered_only() {
    page::run("docs/guides/recipes/registered-only.md");
}

#[test]
fn per_server() {
    page::run("docs/guides/recipes/per-server.md");
}

#[test]
fn plans_three_windows() {
    page::run("docs/guides/recipes/plans-three-windows.md");
}
