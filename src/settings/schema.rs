//! [`schema`]: a JSON Schema (draft 2020-12) of settings files for editors. A test generates it from the types of the
//! settings, so that the program is compiled without the generator.

use serde_json::Value;

/// Returns the JSON Schema of settings files.
#[must_use]
pub fn schema() -> Value {
    // A test generates the text.
    serde_json::from_str(include_str!("schema.json")).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, env, fs, path::Path};

    use config::{Config, Source};
    use schemars::{
        Schema,
        generate::SchemaSettings,
        transform::{Transform, transform_subschemas},
    };

    use super::{super::*, schema};

    /// A transformation of the schema after which it rejects unknown settings, as [`Settings::load`] does.
    #[derive(Clone)]
    struct RejectUnknownSettings;

    impl Transform for RejectUnknownSettings {
        fn transform(&mut self, schema: &mut Schema) {
            if schema.get("properties").is_some() {
                schema.insert("additionalProperties".to_owned(), false.into());
            }
            transform_subschemas(self, schema);
        }
    }

    /// `UPDATE_GENERATED=1` writes the schema of the present settings.
    #[test]
    fn the_schema_is_that_of_the_settings() {
        let generator = SchemaSettings::draft2020_12().with_transform(RejectUnknownSettings).into_generator();
        let mut schema = generator.into_root_schema_for::<Settings>();
        schema.insert("title".to_owned(), "Settings of Sluicegate".into());
        let text = format!("{:#}\n", schema.to_value());
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/settings/schema.json");
        if env::var_os("UPDATE_GENERATED").is_some() {
            fs::write(&path, &text).unwrap();
        }
        let is_fresh = fs::read_to_string(&path).unwrap() == text;
        assert!(is_fresh, "{} is out of date; set UPDATE_GENERATED=1 for this test", path.display());
    }

    /// Collects the dotted names of the settings.
    fn collect_names(schema: &serde_json::Value, node: &serde_json::Value, above: &str, found: &mut BTreeSet<String>) {
        let options = node["anyOf"].as_array().into_iter().flatten().chain([node]);
        let mut inner = options.filter_map(|option| {
            let name = option["$ref"].as_str().and_then(|name| name.strip_prefix("#/$defs/"));
            let option = name.map_or(option, |name| &schema["$defs"][name]);
            option["properties"].as_object()
        });
        match inner.next() {
            Some(properties) => {
                for (name, property) in properties {
                    let name = if above.is_empty() { name.clone() } else { format!("{above}.{name}") };
                    collect_names(schema, property, &name, found);
                }
            }
            None => {
                found.insert(above.to_owned());
            }
        }
    }

    #[test]
    fn the_schema_contains_every_setting() {
        let schema = schema();
        let mut described = BTreeSet::new();
        collect_names(&schema, &schema, "", &mut described);
        let mut known = keys(&Config::try_from(&Settings::default()).unwrap().collect().unwrap());
        known.extend(LISTS.map(str::to_owned));
        assert!(known.is_subset(&described), "{:?}", known.difference(&described).collect::<Vec<_>>());
        // Lists of tables and optional tables appear with the names of their fields.
        let more: Vec<_> = described
            .difference(&known)
            .filter(|name| !known.iter().any(|known| name.starts_with(&format!("{known}."))))
            .collect();
        assert_eq!(more, Vec::<&String>::new());
    }

    #[test]
    fn the_schema_accepts_valid_files_and_rejects_invalid_ones() {
        let schema = schema();
        jsonschema::meta::validate(&schema).unwrap_or_else(|error| panic!("{error}"));
        let validator = jsonschema::validator_for(&schema).unwrap();
        let is_valid =
            |text: &str| validator.is_valid(&serde_json::to_value(text.parse::<toml::Table>().unwrap()).unwrap());
        assert!(is_valid(&Settings::default().masked()));
        for text in [
            "store = 'redis://host'\nworkers = 2\n[redis]\ntimeout = '1m 30s'\n[[redis.ring]]\nname = 'a'\nurl = 'redis://x'\n",
            "[telemetry.log]\nformat = 'logstash'\n[decisions]\non_error = 'local'\n[rules.xds]\nserver = 'http://x'\n",
            "[[telemetry.statsd.name_mappings]]\npattern = 'a'\nname = 'b'\n",
            "[admin]\naddr = '127.0.0.1:1'\n[grpc]\nmax_connections = 7\n",
        ] {
            assert!(is_valid(text), "{text}");
        }
        for text in [
            "stor = 'memory'\n",
            "workers = 'two'\n",
            "[grpc]\nadr = 'x'\n",
            "[redis]\ntimeout = 'soon'\n",
            "[telemetry.log]\nformat = 'xml'\n",
            "[decisions]\non_error = 'maybe'\n",
        ] {
            assert!(!is_valid(text), "{text}");
        }
    }
}
