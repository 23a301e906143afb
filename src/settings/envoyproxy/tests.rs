use super::*;

fn read(variables: &[(&str, &str)]) -> Result<EnvoyproxySettings, VariableError> {
    EnvoyproxySettings::read(&variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect())
}

/// Returns one setting in TOML.
fn setting(variables: &[(&str, &str)], name: &str) -> Option<String> {
    let result = read(variables).unwrap();
    let mut value = &Value::Table(result.settings);
    for segment in name.split('.') {
        value = value.get(segment)?;
    }
    Some(value.as_str().map_or_else(|| value.to_string(), str::to_owned))
}

#[test]
fn unset_variables_have_the_defaults_of_envoyproxy_ratelimit() {
    for (name, expected) in [
        ("http.addr", "0.0.0.0:8080"),
        ("http.debug_addr", "0.0.0.0:6070"),
        ("grpc.addr", "0.0.0.0:8081"),
        ("grpc.max_connection_age", "1day"),
        ("grpc.max_connection_age_grace", "1h"),
        ("telemetry.log.level", "warn"),
        ("rules.dir", "/srv/runtime_data/current/config"),
        ("store", "redis+unix:///var/run/nutcracker/ratelimit.sock"),
        ("redis.expiry_jitter", "5m"),
        ("redis.bound_expiry_jitter", "false"),
        ("deny_cache.max_entries", "0"),
        ("decisions.near_limit_ratio", "0.8"),
        ("response.limit_header", "RateLimit-Limit"),
        ("telemetry.otlp.endpoint", "http://localhost:4318"),
        ("telemetry.otlp.sample_ratio", "1.0"),
    ] {
        assert_eq!(setting(&[], name).as_deref(), Some(expected), "{name}");
    }
    for name in ["http.metrics_addr", "per_second.store", "grpc.tls", "grpc.uds", "redis.connect_timeout"] {
        assert_eq!(setting(&[], name), None, "{name}");
    }
    assert_eq!(read(&[]).unwrap().without_effect(), []);
}

#[test]
fn addresses_are_built_from_a_host_and_a_port() {
    let http = |variables: &[(&str, &str)]| setting(variables, "http.addr").unwrap();
    assert_eq!(http(&[("HOST", "::"), ("PORT", "1")]), "[::]:1");
    assert_eq!(http(&[("HOST", "127.0.0.1")]), "127.0.0.1:8080");
    assert_eq!(http(&[("HOST", "")]), "0.0.0.0:8080");
    let metrics =
        |addr| setting(&[("USE_PROMETHEUS", "true"), ("PROMETHEUS_ADDR", addr)], "http.metrics_addr").unwrap();
    let unspecified = if std::net::UdpSocket::bind("[::]:0").is_ok() { "[::]" } else { "0.0.0.0" };
    assert_eq!((metrics(":19001"), metrics("10.0.0.1:2")), (format!("{unspecified}:19001"), "10.0.0.1:2".into()));
    let tls = [("GRPC_SERVER_USE_TLS", "1"), ("GRPC_SERVER_TLS_CERT", "/certs/tls.crt")];
    assert_eq!(setting(&tls, "grpc.tls.cert_file").as_deref(), Some("/certs/tls.crt"));
    assert_eq!(setting(&tls[1..], "grpc.tls"), None);
    let traces = [("TRACING_EXPORTER_PROTOCOL", "grpc"), ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://otel:4317")];
    assert_eq!(setting(&traces, "telemetry.otlp.endpoint").as_deref(), Some("http://otel:4317"));
    assert_eq!(setting(&traces[..1], "telemetry.otlp.endpoint").as_deref(), Some("http://localhost:4317"));
}

#[test]
fn logs_and_metrics_use_the_formats_of_envoyproxy_ratelimit() {
    for (variable, value, name, expected) in [
        ("LOG_FORMAT", "json", "telemetry.log.format", "logstash"),
        ("LOG_FORMAT", "xml", "telemetry.log.format", "text"),
        ("PROMETHEUS_MAPPER_YAML", "/a.yaml", "telemetry.prometheus.mapping_file", "/a.yaml"),
        ("PROMETHEUS_RESPONSE_TIME_AS_MILLISECONDS", "true", "telemetry.prometheus.milliseconds", "true"),
    ] {
        assert_eq!(setting(&[(variable, value)], name).as_deref(), Some(expected), "{variable}");
    }
    assert_eq!(setting(&[], "telemetry.prometheus.mapping_file"), None);
}

/// The first variables are those that Envoy Gateway sets; the others are all that remain.
#[test]
fn xds_variables_configure_the_control_plane() {
    let mut variables = vec![
        ("CONFIG_TYPE", "GRPC_XDS_SOTW"),
        ("CONFIG_GRPC_XDS_SERVER_URL", "envoy-gateway:18001"),
        ("CONFIG_GRPC_XDS_NODE_ID", "envoy-ratelimit"),
        ("CONFIG_GRPC_XDS_SERVER_USE_TLS", "true"),
        ("CONFIG_GRPC_XDS_CLIENT_TLS_CERT", "/certs/tls.crt"),
        ("CONFIG_GRPC_XDS_CLIENT_TLS_KEY", "/certs/tls.key"),
        ("CONFIG_GRPC_XDS_SERVER_TLS_CACERT", "/certs/ca.crt"),
        ("FORCE_START_WITHOUT_INITIAL_CONFIG", "true"),
    ];
    for (name, expected) in [
        ("server", Some("https://envoy-gateway:18001")),
        ("node_id", Some("envoy-ratelimit")),
        ("node_metadata", Some("[]")),
        ("tls.cert_file", Some("/certs/tls.crt")),
        ("tls.key_file", Some("/certs/tls.key")),
        ("tls.ca_file", Some("/certs/ca.crt")),
        ("tls.server_name", None),
        ("start_without_rules", Some("true")),
        ("retry_min", None),
        ("max_message_bytes", None),
    ] {
        assert_eq!(setting(&variables, &format!("rules.xds.{name}")).as_deref(), expected, "{name}");
    }
    assert_eq!(setting(&variables, "rules.dir"), None);
    variables.extend([
        ("CONFIG_GRPC_XDS_NODE_METADATA", "zone=a, owner=b=c"),
        ("CONFIG_GRPC_XDS_CLIENT_ADDITIONAL_HEADERS", "authorization:Bearer x,other: y"),
        ("CONFIG_GRPC_XDS_SERVER_TLS_SAN", "gateway"),
        ("XDS_CLIENT_BACKOFF_INITIAL_INTERVAL", "45s"),
        ("XDS_CLIENT_MAX_MSG_SIZE_IN_BYTES", "1000"),
    ]);
    for (name, expected) in [
        ("node_metadata", r#"["zone=a", "owner=b=c"]"#),
        ("headers", r#"["authorization=Bearer x", "other=y"]"#),
        ("tls.server_name", "gateway"),
        ("retry_min", "45s"),
        ("retry_max", "1m"),
        ("max_message_bytes", "1000"),
    ] {
        assert_eq!(setting(&variables, &format!("rules.xds.{name}")).as_deref(), Some(expected), "{name}");
    }
    let plain = [("CONFIG_TYPE", "GRPC_XDS_SOTW"), ("CONFIG_GRPC_XDS_CLIENT_TLS_CERT", "/certs/tls.crt")];
    assert_eq!(setting(&plain, "rules.xds.server").as_deref(), Some("http://localhost:18000"));
    assert_eq!(setting(&plain, "rules.xds.node_id").as_deref(), Some("default"));
    assert_eq!(setting(&plain, "rules.xds.tls"), None);
    let error = read(&[plain[0], ("CONFIG_GRPC_XDS_NODE_METADATA", "zone")]).unwrap_err().to_string();
    assert!(error.contains("name=value"), "{error}");
}

#[test]
fn the_address_of_redis_is_built_from_its_variables() {
    for (variables, expected) in [
        (&[("REDIS_URL", "redis:6379")][..], "redis://redis:6379"),
        (&[("REDIS_URL", "redis:6379"), ("REDIS_TLS", "true")], "rediss://redis:6379"),
        (&[("REDIS_URL", "redis:6379"), ("REDIS_AUTH", "p@:/")], "redis://p%40:%2F@redis:6379"),
        (&[("REDIS_URL", "redis:6379"), ("REDIS_AUTH", "p@/")], "redis://:p%40%2F@redis:6379"),
        (&[("REDIS_URL", "redis://u:p@redis:6379/3")], "redis://u:p@redis:6379/3"),
        (&[("REDIS_URL", "redis://u:p@redis:6379"), ("REDIS_AUTH", "q")], "redis://:q@redis:6379"),
        (&[("REDIS_URL", "rediss://redis")], "rediss://redis"),
        (&[("REDIS_URL", "a:1,b:2"), ("REDIS_TYPE", "CLUSTER")], "redis+cluster://a:1,b:2"),
        (
            &[("REDIS_URL", "main,a:1,b:2"), ("REDIS_TYPE", "Sentinel"), ("REDIS_TLS", "t")],
            "rediss+sentinel://a:1,b:2/main",
        ),
    ] {
        let variables = [&[("REDIS_SOCKET_TYPE", "tcp")], variables].concat();
        assert_eq!(setting(&variables, "store").as_deref(), Some(expected));
    }
    let unix = [("REDIS_URL", "/run/r.sock"), ("REDIS_AUTH", "u:p")];
    assert_eq!(setting(&unix, "store").as_deref(), Some("redis+unix:///run/r.sock?pass=p&user=u"));
    let both = [("REDIS_AUTH", "p"), ("REDIS_AUTH_FILE", "/p")];
    assert!(read(&both).unwrap_err().to_string().ends_with("cannot be combined with REDIS_AUTH"));
    let second = [
        ("REDIS_AUTH_FILE", "/secrets/one"),
        ("REDIS_PERSECOND_AUTH_FILE", "/secrets/two"),
        ("REDIS_TLS_SKIP_HOSTNAME_VERIFICATION", "true"),
        ("REDIS_PERSECOND", "true"),
        ("REDIS_PERSECOND_URL", "b:2"),
        ("REDIS_PERSECOND_SOCKET_TYPE", "tcp"),
        ("REDIS_PERSECOND_TIMEOUT", "1.5s"),
        ("REDIS_PERSECOND_SENTINEL_AUTH", "u:p"),
        ("CACHE_KEY_PREFIX", "mine:"),
        ("EXPIRATION_JITTER_MAX_SECONDS", "7"),
    ];
    for (name, expected) in [
        ("per_second.store", "redis://b:2"),
        ("per_second.redis.connect_timeout", "1s 500ms"),
        ("per_second.redis.sentinel.username", "u"),
        ("per_second.redis.sentinel.password", "p"),
        ("redis.password_file", "/secrets/one"),
        ("per_second.redis.password_file", "/secrets/two"),
        ("redis.tls.verify_name", "false"),
        ("per_second.redis.tls.verify_name", "false"),
        ("per_second.redis.key_prefix", "mine:"),
        ("per_second.redis.expiry_jitter", "7s"),
        ("per_second.redis.bound_expiry_jitter", "false"),
        ("redis.key_prefix", "mine:"),
    ] {
        assert_eq!(setting(&second, name).as_deref(), Some(expected), "{name}");
    }
}

#[test]
fn statsd_is_used_unless_another_sink_is() {
    let statsd = |variables: &[(&str, &str)], name: &str| setting(variables, &format!("telemetry.statsd.{name}"));
    assert_eq!(statsd(&[], "addr").as_deref(), Some("localhost:8125"));
    for (name, value) in [("USE_STATSD", "false"), ("USE_PROMETHEUS", "true"), ("DISABLE_STATS", "true")] {
        assert_eq!(statsd(&[(name, value)], "addr"), None, "{name}");
    }
    let dogstatsd = [
        ("USE_DOG_STATSD", "true"),
        ("USE_STATSD", "false"),
        ("STATSD_HOST", "dog"),
        ("EXTRA_TAGS", "a:b, c:d"),
        ("STATS_FLUSH_INTERVAL", "1m"),
        ("USE_DOG_STATSD_MOGRIFIERS", "ALL"),
        ("DOG_STATSD_MOGRIFIER_ALL_PATTERN", "^(.*)$"),
        ("DOG_STATSD_MOGRIFIER_ALL_NAME", "x"),
        ("DOG_STATSD_MOGRIFIER_ALL_TAGS", "name:$1"),
    ];
    for (name, expected) in [
        ("addr", "dog:8125"),
        ("protocol", "udp"),
        ("tags", r#"["a:b", "c:d"]"#),
        ("interval", "1m"),
        ("name_mappings", r#"[{ name = "x", pattern = "^(.*)$", tags = ["name:$1"] }]"#),
    ] {
        assert_eq!(statsd(&dogstatsd, name).as_deref(), Some(expected));
    }
    assert!(read(&dogstatsd[..6]).unwrap_err().to_string().contains("requires DOG_STATSD_MOGRIFIER_ALL_PATTERN"));
}

#[test]
fn memcached_is_configured_by_its_variables() {
    use crate::settings::{Flags, Settings};

    let backend = ("BACKEND_TYPE", "memcache");
    let all = [
        backend,
        ("MEMCACHE_HOST_PORT", "a:1,b:2"),
        ("MEMCACHE_TLS", "true"),
        ("MEMCACHE_TLS_CLIENT_CERT", "/cert"),
        ("MEMCACHE_TLS_CLIENT_KEY", "/key"),
        ("MEMCACHE_TLS_CACERT", "/ca"),
        ("MEMCACHE_TLS_SKIP_HOSTNAME_VERIFICATION", "true"),
        ("CACHE_KEY_PREFIX", "p:"),
    ];
    let flags = Flags { envoyproxy: Some(read(&all).unwrap()), ..Flags::default() };
    let settings = Settings::load(None, Some(HashMap::new()), flags).unwrap();
    assert_eq!((settings.store.as_str(), settings.memcached.key_prefix.as_str()), ("memcacheds://a:1,b:2", "p:"));
    let tls = &settings.memcached.tls;
    let files = [&tls.cert_file, &tls.key_file, &tls.ca_file].map(|file| file.as_ref().unwrap().to_str().unwrap());
    assert_eq!((files, tls.verify_name), (["/cert", "/key", "/ca"], false));
    assert_eq!(settings.warnings, [""; 0]);
    for (variables, expected) in [
        (&[backend][..], "must list the servers"),
        (&[backend, ("MEMCACHE_SRV", "_memcache._tcp.x")], "is not supported: list the servers"),
        (&[backend, ("MEMCACHE_HOST_PORT", "a"), ("MEMCACHE_TLS", "yes")], "MEMCACHE_TLS=\"yes\" is not a boolean"),
    ] {
        let error = read(variables).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn variables_without_effect_are_listed_and_unknown_ones_are_not() {
    let result = read(&[("REDIS_POOL_SIZE", "20"), ("MEMCACHE_SRV", ""), ("GRPC_SERVER_TLS_CA_CERT", "x")]).unwrap();
    let names: Vec<_> = result.without_effect().iter().map(|(name, _)| *name).collect();
    assert_eq!(names, ["REDIS_POOL_SIZE"]);
}

#[test]
fn an_invalid_value_is_reported_with_its_variable() {
    for (name, value, expected) in [
        ("PORT", "http", "is not a port number"),
        ("GRPC_PORT", "70000", "is not a port number"),
        ("USE_PROMETHEUS", "yes", "is not a boolean"),
        ("SHADOW_MODE", "yes", "is not a boolean"),
        ("LOG_LEVEL", "loud", "is not a log level"),
        ("GRPC_MAX_CONNECTION_AGE", "1 day", "is not a duration such as 10s"),
        ("NEAR_LIMIT_RATIO", "most", "is not a number"),
        ("CONFIG_TYPE", "file", "is neither FILE nor"),
        ("BACKEND_TYPE", "disk", "is neither redis nor memcache"),
        ("REDIS_TYPE", "ring", "is not single"),
        ("REDIS_URL", "http://x", "is neither host:port"),
        ("TRACING_EXPORTER_PROTOCOL", "udp", "is neither http nor grpc"),
    ] {
        let error = read(&[(name, value)]).unwrap_err().to_string();
        assert!(error.contains(expected) && error.starts_with(name), "{error}");
    }
    for (variables, name, expected) in [
        (&[("HOST", "no such host")][..], "HOST", "is not a host"),
        (&[("GRPC_PORT", "tcp://10.96.0.7:8081")], "GRPC_PORT", "enableServiceLinks"),
        (&[("USE_STATSD", "true"), ("STATSD_PORT", "tcp://10.96.0.7:8125")], "STATSD_PORT", "enableServiceLinks"),
        (&[("STATSD_PORT", "http")], "STATSD_PORT", "is not a port number"),
        (&[("STATSD_HOST", "a b")], "STATSD_HOST", "is not a host name"),
        (&[("STATSD_HOST", "a:1")], "STATSD_HOST", "is not a host name"),
        (&[("EXTRA_TAGS", "zone:a,b")], "EXTRA_TAGS", "name:value"),
        (&[("EXTRA_TAGS", "zone:a\nb:1|c")], "EXTRA_TAGS", "name:value"),
        (&[("STATS_FLUSH_INTERVAL", "0")], "STATS_FLUSH_INTERVAL", "greater than 0"),
        (&[("USE_PROMETHEUS", "true"), ("PROMETHEUS_ADDR", "9090")], "PROMETHEUS_ADDR", "is not a port number"),
        (&[("PROMETHEUS_PATH", "metrics")], "PROMETHEUS_PATH", "/metrics"),
        (&[("NEAR_LIMIT_RATIO", "80")], "NEAR_LIMIT_RATIO", "between 0 and 1"),
        (&[("TRACING_SAMPLING_RATE", "NaN")], "TRACING_SAMPLING_RATE", "between 0 and 1"),
        (&[("LIMIT_LIMIT_HEADER", "Rate Limit")], "LIMIT_LIMIT_HEADER", "HTTP header"),
        (&[("CACHE_KEY_PREFIX", "{a}")], "CACHE_KEY_PREFIX", "brace"),
        (&[("REDIS_TIMEOUT", "0s")], "REDIS_TIMEOUT", "greater than 0"),
        (&[("REDIS_URL", "127.0.0.1:6379")], "REDIS_URL", "REDIS_SOCKET_TYPE=tcp"),
        (&[("REDIS_SOCKET_TYPE", "udp")], "REDIS_SOCKET_TYPE", "neither tcp nor unix"),
        (&[("TRACING_ENABLED", "true"), ("OTEL_EXPORTER_OTLP_ENDPOINT", "otel:4317")], OTLP_ENDPOINT, "http://"),
    ] {
        let error = read(variables).unwrap_err().to_string();
        assert!(error.starts_with(&format!("{name}=")) && error.contains(expected), "{error}");
    }
    for (kind, url, expected) in [
        ("single", "redis:6379:1", "is not a host name"),
        ("single", "2001:db8::1", "brackets"),
        ("single", "redis:99999", "is not a port number"),
        ("single", "redis :6379", "is not a host name"),
        ("single", "redis:tcp://10.96.0.9:6379", "enableServiceLinks"),
        ("single", "a:1,b:2", "is not a host name"),
        ("single", "redis://redis:6379/first", "number of a database"),
        ("single", "redis://:a/b@redis:6379", "percent-encoded"),
        ("single", ":6379", "is not a host name"),
        ("cluster", "a:1, b:2", "is not a host name"),
        ("cluster", "a:1/2", "only database 0"),
        ("cluster", ",", "contains no host"),
        ("sentinel", "m, 127.0.0.1:1", "is not a host name"),
        ("sentinel", "m,", "contains no host"),
        ("sentinel", ",a:1", "master,host:port"),
    ] {
        let variables = [("REDIS_SOCKET_TYPE", "tcp"), ("REDIS_TYPE", kind), ("REDIS_URL", url)];
        let error = read(&variables).unwrap_err().to_string();
        assert!(error.starts_with("REDIS_URL=") && error.contains(expected), "{error}");
    }
    let sentinel = [("REDIS_TYPE", "sentinel"), ("REDIS_URL", "main")];
    assert!(read(&sentinel).unwrap_err().to_string().contains("master,host:port"));
}

#[test]
fn invalid_variables_of_the_control_plane_are_reported_without_secrets() {
    for (name, value, expected) in [
        ("CONFIG_GRPC_XDS_SERVER_URL", "gateway", "has no port"),
        ("CONFIG_GRPC_XDS_SERVER_URL", "http://gateway:18000", "is not a host name"),
        ("CONFIG_GRPC_XDS_SERVER_URL", "gate way:18000", "is not a host name"),
        ("CONFIG_GRPC_XDS_NODE_METADATA", "=x", "name=value"),
        ("CONFIG_GRPC_XDS_CLIENT_ADDITIONAL_HEADERS", "a b:hunter2", "\"a b\""),
        ("CONFIG_GRPC_XDS_CLIENT_ADDITIONAL_HEADERS", "a:hunter2\nb", "value of a"),
        ("CONFIG_GRPC_XDS_CLIENT_ADDITIONAL_HEADERS", "hunter2", "name:value"),
        ("XDS_CLIENT_BACKOFF_INITIAL_INTERVAL", "0s", "greater than 0"),
        ("XDS_CLIENT_BACKOFF_INITIAL_INTERVAL", "2m", "XDS_CLIENT_BACKOFF_MAX_INTERVAL=60s"),
        ("XDS_CLIENT_BACKOFF_MAX_INTERVAL", "1s", "XDS_CLIENT_BACKOFF_INITIAL_INTERVAL=10s"),
    ] {
        let error = read(&[("CONFIG_TYPE", "GRPC_XDS_SOTW"), (name, value)]).unwrap_err().to_string();
        assert!(error.starts_with(&format!("{name}=")) && error.contains(expected), "{error}");
        assert!(!error.contains("hunter2"), "{error}");
    }
    let redis = [("REDIS_SOCKET_TYPE", "tcp"), ("REDIS_URL", "redis://:hunter2@red is:6379")];
    let error = read(&redis).unwrap_err().to_string();
    assert!(error.starts_with("REDIS_URL=\"***@red is:6379\"") && !error.contains("hunter2"), "{error}");
}

/// A Service named `statsd` sets `STATSD_PORT` in all pods of its namespace.
#[test]
fn a_service_link_without_an_effect_is_no_error() {
    assert!(read(&[("USE_STATSD", "false"), ("STATSD_PORT", "tcp://10.96.0.7:8125")]).is_ok());
    assert!(read(&[("REDIS_PORT", "tcp://10.96.0.9:6379")]).is_ok());
    let statsd = setting(&[("STATSD_HOST", "::1")], "telemetry.statsd.addr");
    assert_eq!(statsd.as_deref(), Some("[::1]:8125"));
}

#[test]
fn durations_have_the_forms_of_go() {
    let millis = |text| values::duration(text).map(|time| time.as_millis());
    for (text, expected) in
        [("0", 0), ("10s", 10_000), ("1h30m", 5_400_000), ("1.5s", 1_500), (".5m", 30_000), ("2ms", 2)]
    {
        assert_eq!(millis(text), Ok(expected), "{text}");
    }
    for text in ["", "10", "s", "1d", "1s2", "-1s", "1..5s", "1e9999h"] {
        assert!(millis(text).is_err(), "{text}");
    }
    assert_eq!(values::age("0"), values::age("876000h"));
}

#[test]
fn the_settings_and_a_warning_about_ignored_variables_take_effect() {
    use crate::settings::{Flags, Settings};

    let load = |variables: &[(&str, &str)]| {
        let flags = Flags { envoyproxy: Some(read(variables).unwrap()), ..Flags::default() };
        Settings::load(None, Some(HashMap::new()), flags).unwrap()
    };
    let redis = ("REDIS_URL", "redis://redis:6379");
    assert_eq!((load(&[redis]).store.as_str(), load(&[redis]).warnings), ("redis://redis:6379", vec![]));
    let warnings = load(&[redis, ("MEMCACHE_SRV", "x"), ("REDIS_POOL_SIZE", "20")]).warnings;
    let [warning] = warnings.as_slice() else { panic!("{warnings:?}") };
    assert!(warning.starts_with("variables without effect: "), "{warning}");
    assert!(
        warning.contains("MEMCACHE_SRV (MEMCACHE_HOST_PORT lists") && warning.contains("REDIS_POOL_SIZE (each"),
        "{warning}"
    );
}

#[test]
fn values_are_converted_to_the_units_and_names_of_the_settings() {
    for (variable, value, name, expected) in [
        ("LOG_LEVEL", "PANIC", "telemetry.log.level", "error"),
        ("LOG_LEVEL", "fatal", "telemetry.log.level", "error"),
        ("LOG_LEVEL", "Error", "telemetry.log.level", "error"),
        ("LOG_LEVEL", "warning", "telemetry.log.level", "warn"),
        ("LOG_LEVEL", "INFO", "telemetry.log.level", "info"),
        ("LOG_LEVEL", "debug", "telemetry.log.level", "debug"),
        ("LOG_LEVEL", "trace", "telemetry.log.level", "trace"),
        ("LOCAL_CACHE_SIZE_IN_BYTES", "1100", "deny_cache.max_entries", "3"),
        ("STATS_FLUSH_INTERVAL", "7000000ns", "telemetry.statsd.interval", "7ms"),
        ("STATS_FLUSH_INTERVAL", "7000us", "telemetry.statsd.interval", "7ms"),
        ("STATS_FLUSH_INTERVAL", "7000µs", "telemetry.statsd.interval", "7ms"),
    ] {
        assert_eq!(setting(&[(variable, value)], name).as_deref(), Some(expected), "{variable}={value}");
    }
    let xds = [("CONFIG_TYPE", "GRPC_XDS_SOTW"), ("XDS_CLIENT_MAX_MSG_SIZE_IN_BYTES", "0")];
    assert_eq!(setting(&xds, "rules.xds.max_message_bytes"), None);
}
