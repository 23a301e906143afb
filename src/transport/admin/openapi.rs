//! The OpenAPI 3.1 description of the admin API, generated from the protobuf descriptors.

use std::{collections::BTreeMap, sync::LazyLock};

use axum::{
    http::header::CONTENT_TYPE,
    response::{IntoResponse, Response},
};
use prost_reflect::{EnumDescriptor, FieldDescriptor, Kind, MessageDescriptor, ServiceDescriptor};
use serde_json::{Value, json};

use super::json::SERVICE;

/// The description as JSON. Empty if the service has no descriptor.
static DESCRIPTION: LazyLock<String> = LazyLock::new(|| match &*SERVICE {
    Some(service) => write(service).to_string(),
    None => String::new(),
});

pub(super) async fn describe() -> Response {
    ([(CONTENT_TYPE, "application/json")], DESCRIPTION.as_str()).into_response()
}

fn write(service: &ServiceDescriptor) -> Value {
    let mut schemas = BTreeMap::new();
    let mut paths = BTreeMap::new();
    for method in service.methods() {
        let comment = comment(&method.parent_file(), method.path());
        add(&method.input(), &mut schemas);
        add(&method.output(), &mut schemas);
        let error = json!({
            "description": "The call failed",
            "content": { "application/json": { "schema": reference("Error") } },
        });
        let output = if method.is_server_streaming() {
            json!({ "text/event-stream": { "itemSchema": reference(method.output().name()) } })
        } else {
            content(&method.output())
        };
        let operation = json!({
            "operationId": method.name(),
            "summary": comment,
            "requestBody": { "content": content(&method.input()) },
            "responses": {
                "200": { "description": "The call succeeded", "content": output },
                "default": error,
            },
        });
        paths.insert(format!("/v1/{}", method.name()), json!({ "post": operation }));
    }
    let text = json!({ "type": "string" });
    schemas.insert(
        "Error".to_owned(),
        json!({ "type": "object", "properties": { "code": text, "message": text }, "required": ["code", "message"] }),
    );
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "sluicegate.admin.v1",
            "description": "Admin API of Sluicegate: overrides, counters, rules and candidate rules.",
            "version": env!("CARGO_PKG_VERSION"),
        },
        "security": [{ "token": [] }],
        "paths": paths,
        "components": {
            "securitySchemes": { "token": { "type": "http", "scheme": "bearer" } },
            "schemas": schemas,
        },
    })
}

/// Returns the content of a body with one message.
fn content(message: &MessageDescriptor) -> Value {
    json!({ "application/json": { "schema": reference(message.name()) } })
}

fn reference(name: &str) -> Value {
    json!({ "$ref": format!("#/components/schemas/{name}") })
}

fn add(message: &MessageDescriptor, schemas: &mut BTreeMap<String, Value>) {
    if schemas.contains_key(message.name()) {
        return;
    }
    // The name is inserted before the fields are described, because a message may contain itself.
    schemas.insert(message.name().to_owned(), Value::Null);
    let mut properties = BTreeMap::new();
    for field in message.fields() {
        properties.insert(field.json_name().to_owned(), property(&field, schemas));
    }
    let mut schema = json!({ "type": "object", "properties": properties });
    describe_as(&mut schema, &comment(&message.parent_file(), message.path()));
    schemas.insert(message.name().to_owned(), schema);
}

fn property(field: &FieldDescriptor, schemas: &mut BTreeMap<String, Value>) -> Value {
    let element = match field.kind() {
        Kind::Message(message) if message.full_name() == "google.protobuf.Timestamp" => {
            json!({ "type": "string", "format": "date-time" })
        }
        Kind::Message(message) => {
            add(&message, schemas);
            reference(message.name())
        }
        Kind::Enum(values) => json!({ "type": "string", "enum": names(&values) }),
        Kind::Bool => json!({ "type": "boolean" }),
        Kind::Int32 | Kind::Sint32 | Kind::Sfixed32 | Kind::Uint32 | Kind::Fixed32 => json!({ "type": "integer" }),
        Kind::Double | Kind::Float => json!({ "type": "number" }),
        // 64-bit numbers are strings in proto3 JSON.
        Kind::Int64 | Kind::Sint64 | Kind::Sfixed64 | Kind::Uint64 | Kind::Fixed64 => {
            json!({ "type": "string", "pattern": "^[0-9]+$" })
        }
        Kind::String | Kind::Bytes => json!({ "type": "string" }),
    };
    let mut schema = if field.is_list() { json!({ "type": "array", "items": element }) } else { element };
    describe_as(&mut schema, &comment(&field.parent_message().parent_file(), field.path()));
    schema
}

fn names(values: &EnumDescriptor) -> Vec<String> {
    values.values().map(|value| value.name().to_owned()).collect()
}

fn describe_as(schema: &mut Value, comment: &str) {
    if !comment.is_empty() {
        schema["description"] = json!(comment);
    }
}

/// Returns the comment above an element of a `.proto` file, on one line.
pub(super) fn comment(file: &prost_reflect::FileDescriptor, path: &[i32]) -> String {
    let info = file.file_descriptor_proto().source_code_info.as_ref();
    let location = info.and_then(|info| info.location.iter().find(|location| location.path == path));
    let comment = location.and_then(|location| location.leading_comments.as_deref()).unwrap_or_default();
    comment.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_schema_has_comments_references_and_the_names_of_values() {
        let description = write(SERVICE.as_ref().unwrap());
        let body = &description["paths"]["/v1/PutOverrides"]["post"]["requestBody"];
        let schema = &body["content"]["application/json"]["schema"];
        assert_eq!(schema["$ref"], "#/components/schemas/PutOverridesRequest");
        let properties = &description["components"]["schemas"]["Override"]["properties"];
        assert_eq!(properties["author"]["description"], "The operator who set the override.");
        let origins = properties["origin"]["enum"].as_array().unwrap();
        assert_eq!(origins.len(), 3, "{origins:?}");
        for name in ["ORIGIN_STORE", "ORIGIN_FILE", "ORIGIN_INSTANCE"] {
            assert!(origins.contains(&json!(name)), "{origins:?}");
        }
    }
}
