//! The search for the entities of a customer on the page “Descriptor”.

use super::{RULES, open, send};
use crate::support::{Browser, Operator, browser::key, rules};

const API: &str = "domain: api\ndescriptors:\n- key: user\n  rate_limit: { unit: year, requests_per_unit: 9 }\n";

#[test]
fn a_word_finds_the_entities_of_a_customer_in_all_domains() {
    let folder = rules(&[("shop.yaml", RULES), ("api.yaml", API)]);
    let operator = Operator::start(folder.path(), "memory");
    let server = &operator.server;
    assert_eq!(send(server, 3, "user", "bob"), 3);
    operator.ctl(&["limit", "set", "api", "user=bob", "7/year", "--reason", "trial"]);
    operator.ctl(&["limit", "set", "shop", "user=bobby", "8/year", "--reason", "trial"]);
    let browser = Browser::start();
    open(&browser, server, "descriptor");
    browser.wait_for_text("[data-test=examples]", &["A single word", "finds the entities"]);
    browser.type_into("textarea[name=descriptor]", &format!("bob{}", key::ENTER));
    let row = "[data-test=found-entities] tbody tr";
    browser.wait_for_text(row, &["shop user=bob", "shop.user", "3", "5 per year"]);
    browser.wait_for_text(row, &["api user=bob", "api.user", "0", "7 per year", "Limit: 7/year"]);
    assert_eq!(browser.count(row), 2);
    // Values that begin with the word are a choice, which is in the URL.
    browser.click("[data-test=prefix]");
    browser.wait_for_text(row, &["shop user=bobby", "8 per year"]);
    assert!(browser.value("location.hash").as_str().unwrap().contains("prefix=1"));
    browser.reload();
    browser.wait_for_text(row, &["shop user=bobby", "8 per year"]);
    // A row leads to the descriptor, which has its own page.
    browser.click(&format!("{row}:last-child a"));
    browser.wait_for_text("[data-test=counter]", &["8 per year"]);
    // The first word of a descriptor, such as a domain with a typing error, is a value like any other.
    open(&browser, server, "descriptor?d=shpo");
    let sentence = "No entity has the value shpo. Rules with one entry, overrides";
    browser.wait_for_text("[data-test=no-entities]", &[sentence]);
}

#[test]
fn other_texts_are_read_as_descriptors() {
    let folder = rules(&[("shop.yaml", RULES)]);
    let operator = Operator::start(folder.path(), "memory");
    let browser = Browser::start();
    let request = "{\"domain\":\"shop\",\"descriptors\":[{\"entries\":[{\"key\":\"user\",\"value\":\"bob\"}]}]}";
    for text in ["shop%20user%3Dbob", request] {
        let page = format!("descriptor?d={text}");
        open(&browser, &operator.server, &page);
        browser.wait_for_text("[data-test=matched-rule]", &["shop.user"]);
        assert_eq!(browser.count("[data-test=customer]"), 0, "{text}");
    }
    browser.expect_log("the server responded with a status of 400");
    open(&browser, &operator.server, "descriptor?d=user%3Dbob");
    browser.text("[data-test=alert]");
    assert_eq!(browser.count("[data-test=customer]"), 0);
}
