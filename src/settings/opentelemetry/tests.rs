use super::{
    super::{Flags, Settings, SettingsError, envoyproxy::EnvoyproxySettings},
    *,
};

fn environment(variables: &[(&str, &str)]) -> HashMap<String, String> {
    variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}

/// Returns one setting in TOML.
fn setting(variables: &[(&str, &str)], name: &str) -> Option<String> {
    let settings = OpenTelemetrySettings::read(&environment(variables), false);
    let value = settings.values.get(name)?;
    Some(value.as_str().map_or_else(|| value.to_string(), str::to_owned))
}

fn load(variables: &[(&str, &str)]) -> Result<Settings, SettingsError> {
    Settings::load(None, Some(environment(variables)), Flags::default())
}

fn load_compatible(variables: &[(&str, &str)]) -> Settings {
    let environment = environment(variables);
    let envoyproxy = Some(EnvoyproxySettings::read(&environment).unwrap());
    Settings::load(None, Some(environment), Flags { envoyproxy, ..Flags::default() }).unwrap()
}

#[test]
fn variables_are_converted_to_settings() {
    for (name, value, setting_name, expected) in [
        ("OTEL_SDK_DISABLED", "TRUE", "enabled", "false"),
        ("OTEL_SDK_DISABLED", "1", "enabled", "true"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", " https://otel:4317 ", "endpoint", "https://otel:4317"),
        ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://a/x", "traces_endpoint", "http://a/x"),
        (
            "OTEL_EXPORTER_OTLP_HEADERS",
            "api-key=a%20b, x = y,nothing,bad name=z,=,",
            "headers",
            r#"["api-key=a b", "x=y"]"#,
        ),
        ("OTEL_EXPORTER_OTLP_METRICS_HEADERS", "a=b%3Dc,b-bin=x", "metrics_headers", r#"["a=b=c"]"#),
        ("OTEL_EXPORTER_OTLP_CERTIFICATE", "/ca.pem", "tls.ca_file", "/ca.pem"),
        ("OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE", "/a.pem", "tls.cert_file", "/a.pem"),
        ("OTEL_EXPORTER_OTLP_TRACES_CLIENT_KEY", "/a.key", "tls.key_file", "/a.key"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip", "compression", "gzip"),
        ("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "1500", "timeout", "1s 500ms"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf", "protocol", "http"),
        ("OTEL_METRIC_EXPORT_INTERVAL", "60000", "interval", "1m"),
        ("OTEL_RESOURCE_ATTRIBUTES", "a=b%2Cc,nothing, d = %ff ,=x", "resource_attributes", r#"["a=b,c", "d=%ff"]"#),
        ("OTEL_RESOURCE_ATTRIBUTES", "service.name=shop", "service_name", "shop"),
        ("OTEL_SERVICE_NAME", "shop", "service_name", "shop"),
        ("OTEL_TRACES_SAMPLER", "parentbased_always_off", "sample_ratio", "0.0"),
        ("OTEL_TRACES_SAMPLER", "parentbased_traceidratio", "sample_ratio", "1.0"),
    ] {
        let found = setting(&[(name, value)], &format!("telemetry.otlp.{setting_name}"));
        assert_eq!(found.as_deref(), Some(expected), "{name}={value}");
    }
    let sampler = [("OTEL_TRACES_SAMPLER", "parentbased_traceidratio"), ("OTEL_TRACES_SAMPLER_ARG", "0.25")];
    assert_eq!(setting(&sampler, "telemetry.otlp.sample_ratio").as_deref(), Some("0.25"));
    let names = [("OTEL_SERVICE_NAME", "a"), ("OTEL_RESOURCE_ATTRIBUTES", "service.name=b")];
    assert_eq!(setting(&names, "telemetry.otlp.service_name").as_deref(), Some("a"));
    assert_eq!(setting(&[("OTEL_SERVICE_NAME", "")], "telemetry.otlp.service_name"), None);
    let both = [("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "1"), ("OTEL_EXPORTER_OTLP_TIMEOUT", "2")];
    assert_eq!(setting(&both, "telemetry.otlp.timeout").as_deref(), Some("1ms"));
    let http = [("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")];
    assert_eq!(setting(&http, ENDPOINT).as_deref(), Some("http://127.0.0.1:4318"));
}

#[test]
fn variables_without_effect_have_a_reason_without_their_value() {
    for (name, value, expected) in [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "hunter2:4317", "is not a URL"),
        ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "https://hunter2@otel", "credentials"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "hunter2", "name=value"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "a=hunter2%0ab", "name=value"),
        ("OTEL_RESOURCE_ATTRIBUTES", "hunter2", "name=value"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "0", "milliseconds"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "10s", "milliseconds"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "zstd", "gzip"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json", "http/protobuf"),
        ("OTEL_EXPORTER_OTLP_INSECURE", "true", "scheme"),
        ("OTEL_TRACES_SAMPLER", "always_on", "parentbased_always_on"),
        ("OTEL_TRACES_SAMPLER_ARG", "1", "OTEL_TRACES_SAMPLER"),
        ("OTEL_PROPAGATORS", "jaeger", "always read"),
    ] {
        let settings = OpenTelemetrySettings::read(&environment(&[(name, value)]), false);
        assert!(settings.values.is_empty(), "{:?}", settings.values);
        let [(found, reason)] = settings.without_effect() else { panic!("{name}: {:?}", settings.without_effect()) };
        assert!(*found == name && reason.contains(expected) && !reason.contains("hunter2"), "{name}: {reason}");
        assert_eq!(load(&[(name, value)]).unwrap().warnings, [""; 0]);
        let traces = ("SLUICEGATE__TELEMETRY__OTLP__TRACES", "true");
        let warnings = load(&[(name, value), traces]).unwrap().warnings;
        assert_eq!(warnings, [format!("variables without effect: {name} ({reason})")]);
    }
    for value in ["2", "x"] {
        let sampler = [("OTEL_TRACES_SAMPLER", "parentbased_traceidratio"), ("OTEL_TRACES_SAMPLER_ARG", value)];
        let settings = OpenTelemetrySettings::read(&environment(&sampler), false);
        assert_eq!(settings.without_effect(), [(SAMPLER, "OTEL_TRACES_SAMPLER_ARG is not between 0 and 1")]);
    }
}

#[test]
fn settings_of_the_service_have_precedence() {
    let variables = [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://variable:1"),
        ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://variable:2/x"),
        ("OTEL_EXPORTER_OTLP_METRICS_HEADERS", "api-key=a"),
        ("OTEL_SDK_DISABLED", "true"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "1000"),
    ];
    let otlp = load(&variables).unwrap().telemetry.otlp;
    assert_eq!(otlp.endpoint, "http://variable:1");
    assert_eq!(otlp.traces_endpoint.as_deref(), Some("http://variable:2/x"));
    assert_eq!(otlp.metrics_headers, ["api-key=a"]);
    assert_eq!(otlp.timeout.as_secs(), 1);
    assert!(!otlp.enabled);
    let own = [
        ("SLUICEGATE__TELEMETRY__OTLP__ENDPOINT", "http://own:1"),
        ("SLUICEGATE__TELEMETRY__OTLP__ENABLED", "true"),
        ("SLUICEGATE__TELEMETRY__OTLP__TIMEOUT", "2s"),
    ];
    let otlp = load(&[&variables[..], &own].concat()).unwrap().telemetry.otlp;
    assert_eq!(otlp.endpoint, "http://own:1");
    assert_eq!(otlp.traces_endpoint, None, "the address of the service is that of both signals");
    assert_eq!(otlp.metrics_headers, ["api-key=a"]);
    assert_eq!(otlp.timeout.as_secs(), 2);
    assert!(otlp.enabled);
    let traces = ("SLUICEGATE__TELEMETRY__OTLP__TRACES_ENDPOINT", "http://own:2");
    let otlp = load(&[&variables[..], &own, &[traces]].concat()).unwrap().telemetry.otlp;
    assert_eq!(otlp.traces_endpoint.as_deref(), Some("http://own:2"));
    let mut file = tempfile::Builder::new().suffix(".toml").tempfile().unwrap();
    std::io::Write::write_all(&mut file, b"telemetry.otlp.headers = ['api-key=own']\n").unwrap();
    let settings = Settings::load(Some(file.path()), Some(environment(&variables)), Flags::default()).unwrap();
    assert_eq!(settings.telemetry.otlp.headers, ["api-key=own"]);
    assert_eq!(settings.telemetry.otlp.metrics_headers, [""; 0]);
    assert!(settings.masked().contains("headers = [\"api-key=***\"]"), "{}", settings.masked());
}

#[test]
fn variables_of_envoyproxy_ratelimit_have_precedence() {
    let variables = [
        ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://variable:2/x"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"),
        ("OTEL_RESOURCE_ATTRIBUTES", "service.name=a,zone=b"),
        ("OTEL_SERVICE_NAME", "a"),
        ("OTEL_TRACES_SAMPLER", "parentbased_always_off"),
        ("OTEL_BSP_SCHEDULE_DELAY", "1000"),
        ("REDIS_POOL_SIZE", "1"),
    ];
    let settings = load_compatible(&variables);
    let otlp = &settings.telemetry.otlp;
    assert_eq!(otlp.endpoint, "http://localhost:4318");
    assert_eq!(otlp.traces_endpoint.as_deref(), Some("http://variable:2/x"));
    assert_eq!(otlp.service_name, "RateLimit");
    assert_eq!(otlp.resource_attributes, ["service.name=a", "zone=b"]);
    assert!((otlp.sample_ratio - 1.0).abs() < f64::EPSILON);
    let [warning] = settings.warnings.as_slice() else { panic!("{:?}", settings.warnings) };
    for name in ["REDIS_POOL_SIZE (", "OTEL_EXPORTER_OTLP_PROTOCOL (TRACING_EXPORTER_PROTOCOL", "OTEL_SERVICE_NAME ("] {
        assert!(warning.contains(name), "{name}: {warning}");
    }
    assert!(warning.contains("OTEL_TRACES_SAMPLER (") && !warning.contains("OTEL_BSP"), "{warning}");
    let own = [variables[0], ("SLUICEGATE__TELEMETRY__OTLP__ENDPOINT", "http://own:1")];
    assert_eq!(load_compatible(&own).telemetry.otlp.traces_endpoint, None);
}

#[test]
fn each_variable_is_listed_once_and_names_a_setting() {
    let known =
        super::super::keys(&config::Source::collect(&config::Config::try_from(&Settings::default()).unwrap()).unwrap());
    let mut names = std::collections::BTreeSet::new();
    for variable in VARIABLES {
        assert!(names.insert(variable.name), "{} is listed twice", variable.name);
        if let Effect::Setting(setting, _) | Effect::Combined(setting) = variable.effect {
            assert!(known.contains(setting) || super::super::LISTS.contains(&setting), "{setting}");
        }
    }
}
