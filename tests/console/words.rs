//! The names of fields and enum values that the pages use are those of the admin API.

use prost_reflect::DescriptorPool;
use sluicegate_proto::FILE_DESCRIPTOR_SET;

use super::{folder, open};
use crate::support::{Browser, Server, repository};

/// All other tests with a browser depend on this: they fail if the log contains such a message.
#[test]
fn reading_a_field_that_a_message_does_not_have_is_logged() {
    let folder = folder();
    let server = Server::start(folder.path(), "memory");
    let browser = Browser::start();
    open(&browser, &server, "now");
    let read = "const done = arguments[0]; fetch('/v1/ListRuleActivity', { method: 'POST' })\
                .then((response) => response.json()).then(({ rows }) => done([rows[0].path, rows[0].rule, rows[0].nothing]))";
    let (path, text) = ("shop", "sluicegate.admin.v1.RuleRow has no field nothing");
    assert_eq!(browser.run_async(read, &serde_json::json!([])), serde_json::json!([path, null, null]));
    let log = browser.log();
    assert!(log.len() == 1 && log[0].contains(text), "{log:?}");
}

#[test]
fn the_enum_values_of_the_pages_exist() {
    let pool = DescriptorPool::decode(FILE_DESCRIPTOR_SET).unwrap();
    let known: Vec<String> = pool
        .all_enums()
        .flat_map(|one| one.values().map(|value| value.name().to_owned()).collect::<Vec<_>>())
        .collect();
    let prefixes: Vec<String> = pool.all_enums().map(|one| prefix(one.name())).collect();
    let mut number = 0;
    for folder in ["console", "console/pages"] {
        for file in std::fs::read_dir(repository(folder)).unwrap().map(|file| file.unwrap().path()) {
            if file.extension().is_none_or(|extension| extension != "js") {
                continue;
            }
            let text = std::fs::read_to_string(&file).unwrap();
            for word in text.split(|symbol: char| symbol != '_' && !symbol.is_ascii_uppercase()) {
                if prefixes.iter().any(|prefix| word.starts_with(prefix)) {
                    number += 1;
                    assert!(known.iter().any(|value| value == word), "{}: {word}", file.display());
                }
            }
        }
    }
    assert!(number > 10, "{number} values were found");
}

/// Returns the prefix of the values of an enum: `RULE_ORDER_` for `RuleOrder`.
fn prefix(name: &str) -> String {
    let mut prefix = String::new();
    for (index, symbol) in name.char_indices() {
        if index > 0 && symbol.is_ascii_uppercase() {
            prefix.push('_');
        }
        prefix.push(symbol.to_ascii_uppercase());
    }
    prefix + "_"
}
