//! Checks that the pages of the console read only fields that the messages of the admin API have.
//!
//! JavaScript has no types, and a field that does not exist is silently undefined. In tests, each answer is therefore an
//! object that reports such a read in the browser's log, where it fails the test.

use prost_reflect::{DescriptorPool, Kind, MessageDescriptor};
use serde_json::{Map, Value};
use sluicegate_proto::FILE_DESCRIPTOR_SET;

const PACKAGE: &str = "sluicegate.admin.v1";

/// Returns the script, which must run before those of the page.
pub(super) fn script() -> String {
    let pool = DescriptorPool::decode(FILE_DESCRIPTOR_SET).unwrap();
    let own = pool.all_messages().filter(|message| message.package_name() == PACKAGE);
    let messages: Map<String, Value> =
        own.map(|message| (message.full_name().to_owned(), Value::Object(fields(&message)))).collect();
    let service = pool.get_service_by_name(&format!("{PACKAGE}.AdminService")).unwrap();
    let answers: Map<String, Value> =
        service.methods().map(|method| (method.name().to_owned(), method.output().full_name().into())).collect();
    let script = include_str!("known_fields.js");
    format!("{{const MESSAGES={}, ANSWERS={};\n{script}}}", Value::Object(messages), Value::Object(answers))
}

/// Returns the fields of a message by their names in JSON, with the names of their messages.
fn fields(message: &MessageDescriptor) -> Map<String, Value> {
    let name_of = |kind: Kind| kind.as_message().map_or(String::new(), |message| message.full_name().to_owned());
    message.fields().map(|field| (field.json_name().to_owned(), name_of(field.kind()).into())).collect()
}
