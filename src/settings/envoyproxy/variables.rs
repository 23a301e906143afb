//! All variables of envoyproxy/ratelimit (main of July 2026, `settings.go`), and what becomes of each.

use super::values::{self, Reading};

/// One of them.
pub struct Variable {
    /// Its name.
    pub name: &'static str,
    /// What it is there when nobody sets it.
    pub default: &'static str,
    /// What it does here.
    pub effect: Effect,
}

/// What a variable does here.
pub enum Effect {
    /// It is one setting.
    Is(&'static str, Reading),
    /// Together with others it makes these settings.
    Makes(&'static str),
    /// Nothing, and why.
    Nothing(&'static str),
}

use Effect::{Is, Makes, Nothing};

const RETRIES: &str = "every pause before a new connection is longer than the one before, less up to half by chance";
const MEMCACHED: &str = "counters are in Redis or in memory, not in memcached";
const PIPELINED: &str = "calls are always pipelined, and shared by the requests of a worker";
const POOL: &str = "each worker has one connection to each server, which all its calls share";
const STARTUP: &str = "the service starts without Redis, and connects when it is there";
const WATCHED: &str =
    "files that change and links that are swapped are both seen; files that begin with a dot are no rules";

const fn variable(name: &'static str, default: &'static str, effect: Effect) -> Variable {
    Variable { name, default, effect }
}

/// In the order of its own documentation.
pub const VARIABLES: &[Variable] = &[
    variable("HOST", "0.0.0.0", Makes("http.addr")),
    variable("PORT", "8080", Makes("http.addr")),
    variable("DEBUG_HOST", "0.0.0.0", Makes("http.debug_addr")),
    variable("DEBUG_PORT", "6070", Makes("http.debug_addr")),
    variable("GRPC_UDS", "", Is("grpc.uds", values::text)),
    variable("GRPC_HOST", "0.0.0.0", Makes("grpc.addr")),
    variable("GRPC_PORT", "8081", Makes("grpc.addr")),
    variable("GRPC_MAX_CONNECTION_AGE", "24h", Is("grpc.max_connection_age", values::age)),
    variable("GRPC_MAX_CONNECTION_AGE_GRACE", "1h", Is("grpc.max_connection_age_grace", values::age)),
    variable("GRPC_SERVER_USE_TLS", "false", Makes("grpc.tls")),
    variable("GRPC_SERVER_TLS_CERT", "", Makes("grpc.tls.cert_file")),
    variable("GRPC_SERVER_TLS_KEY", "", Makes("grpc.tls.key_file")),
    variable("GRPC_CLIENT_TLS_CACERT", "", Makes("grpc.tls.client_ca_file")),
    variable("GRPC_CLIENT_TLS_SAN", "", Makes("grpc.tls.client_name")),
    variable("LOG_LEVEL", "WARN", Is("telemetry.log.level", values::level)),
    variable("LOG_FORMAT", "text", Is("telemetry.log.format", values::log_format)),
    variable("CONFIG_TYPE", "FILE", Makes("rules")),
    variable("FORCE_START_WITHOUT_INITIAL_CONFIG", "false", Is("rules.xds.start_without_rules", values::flag)),
    variable("CONFIG_GRPC_XDS_NODE_ID", "default", Makes("rules.xds.node_id")),
    variable("CONFIG_GRPC_XDS_NODE_METADATA", "", Makes("rules.xds.node_metadata")),
    variable("CONFIG_GRPC_XDS_SERVER_URL", "localhost:18000", Makes("rules.xds.server")),
    variable("CONFIG_GRPC_XDS_SERVER_CONNECT_RETRY_INTERVAL", "3s", Nothing(RETRIES)),
    variable("CONFIG_GRPC_XDS_CLIENT_ADDITIONAL_HEADERS", "", Makes("rules.xds.headers")),
    variable("CONFIG_GRPC_XDS_SERVER_USE_TLS", "false", Makes("rules.xds.server")),
    variable("CONFIG_GRPC_XDS_CLIENT_TLS_CERT", "", Makes("rules.xds.tls.cert_file")),
    variable("CONFIG_GRPC_XDS_CLIENT_TLS_KEY", "", Makes("rules.xds.tls.key_file")),
    variable("CONFIG_GRPC_XDS_SERVER_TLS_CACERT", "", Makes("rules.xds.tls.ca_file")),
    variable("CONFIG_GRPC_XDS_SERVER_TLS_SAN", "", Makes("rules.xds.tls.server_name")),
    variable("XDS_CLIENT_BACKOFF_INITIAL_INTERVAL", "10s", Makes("rules.xds.retry_min, when it is set")),
    variable("XDS_CLIENT_BACKOFF_MAX_INTERVAL", "60s", Makes("rules.xds.retry_max, when it is set")),
    variable("XDS_CLIENT_BACKOFF_RANDOM_FACTOR", "0.5", Nothing(RETRIES)),
    variable("XDS_CLIENT_BACKOFF_JITTER", "true", Nothing(RETRIES)),
    variable("XDS_CLIENT_MAX_MSG_SIZE_IN_BYTES", "", Makes("rules.xds.max_message_bytes, when it is set")),
    variable("USE_DOG_STATSD", "false", Makes("telemetry.statsd.protocol")),
    variable("USE_DOG_STATSD_MOGRIFIERS", "", Makes("telemetry.statsd.name_mappings")),
    variable("USE_STATSD", "true", Makes("telemetry.statsd.addr")),
    variable("STATSD_HOST", "localhost", Makes("telemetry.statsd.addr")),
    variable("STATSD_PORT", "8125", Makes("telemetry.statsd.addr")),
    variable("EXTRA_TAGS", "", Makes("telemetry.statsd.tags")),
    variable("STATS_FLUSH_INTERVAL", "10s", Is("telemetry.statsd.interval", values::interval)),
    variable("DISABLE_STATS", "false", Makes("telemetry.statsd.addr")),
    variable("USE_PROMETHEUS", "false", Makes("http.metrics_addr")),
    variable("PROMETHEUS_ADDR", ":9090", Makes("http.metrics_addr")),
    variable("PROMETHEUS_PATH", "/metrics", Is("http.metrics_path", values::text)),
    variable("PROMETHEUS_MAPPER_YAML", "", Is("telemetry.prometheus.mapping_file", values::text)),
    variable(
        "PROMETHEUS_RESPONSE_TIME_AS_MILLISECONDS",
        "false",
        Is("telemetry.prometheus.milliseconds", values::flag),
    ),
    variable("RUNTIME_ROOT", "/srv/runtime_data/current", Makes("rules.dir")),
    variable("RUNTIME_SUBDIRECTORY", "", Makes("rules.dir")),
    variable("RUNTIME_APPDIRECTORY", "config", Makes("rules.dir")),
    variable("RUNTIME_IGNOREDOTFILES", "false", Nothing(WATCHED)),
    variable("RUNTIME_WATCH_ROOT", "true", Nothing(WATCHED)),
    variable("EXPIRATION_JITTER_MAX_SECONDS", "300", Makes("redis.expiry_jitter, per_second.redis.expiry_jitter")),
    variable("LOCAL_CACHE_SIZE_IN_BYTES", "0", Is("deny_cache.max_entries", values::cache_size)),
    variable("NEAR_LIMIT_RATIO", "0.8", Is("decisions.near_limit_ratio", values::ratio)),
    variable("CACHE_KEY_PREFIX", "", Makes("redis.key_prefix, per_second.redis.key_prefix")),
    variable("BACKEND_TYPE", "redis", Makes("store")),
    variable("STOP_CACHE_KEY_INCREMENT_WHEN_OVERLIMIT", "false", Is("rules.charge_all", values::flag)),
    variable("LIMIT_RESPONSE_HEADERS_ENABLED", "false", Is("response.headers", values::flag)),
    variable("LIMIT_LIMIT_HEADER", "RateLimit-Limit", Is("response.limit_header", values::text)),
    variable("LIMIT_REMAINING_HEADER", "RateLimit-Remaining", Is("response.remaining_header", values::text)),
    variable("LIMIT_RESET_HEADER", "RateLimit-Reset", Is("response.reset_header", values::text)),
    variable("HEALTHY_WITH_AT_LEAST_ONE_CONFIG_LOADED", "false", Is("rules.required_for_health", values::flag)),
    variable("REDIS_SOCKET_TYPE", "unix", Makes("store")),
    variable("REDIS_TYPE", "SINGLE", Makes("store")),
    variable("REDIS_URL", "/var/run/nutcracker/ratelimit.sock", Makes("store")),
    variable("REDIS_POOL_SIZE", "10", Nothing(POOL)),
    variable("REDIS_AUTH", "", Makes("store")),
    variable("REDIS_TLS", "false", Makes("store")),
    variable("REDIS_TLS_CLIENT_CERT", "", Makes("redis.tls.cert_file, per_second.redis.tls.cert_file")),
    variable("REDIS_TLS_CLIENT_KEY", "", Makes("redis.tls.key_file, per_second.redis.tls.key_file")),
    variable("REDIS_TLS_CACERT", "", Makes("redis.tls.ca_file, per_second.redis.tls.ca_file")),
    variable("REDIS_TLS_SKIP_HOSTNAME_VERIFICATION", "false", Nothing("a server must be who its certificate says")),
    variable("REDIS_PIPELINE_WINDOW", "0", Nothing(PIPELINED)),
    variable("REDIS_PIPELINE_LIMIT", "0", Nothing(PIPELINED)),
    variable("REDIS_CLUSTER_PIPELINE_PARALLELISM", "1", Nothing("servers are always asked in parallel")),
    variable("REDIS_PERSECOND", "false", Makes("per_second.store")),
    variable("REDIS_PERSECOND_SOCKET_TYPE", "unix", Makes("per_second.store")),
    variable("REDIS_PERSECOND_TYPE", "SINGLE", Makes("per_second.store")),
    variable("REDIS_PERSECOND_URL", "/var/run/nutcracker/ratelimitpersecond.sock", Makes("per_second.store")),
    variable("REDIS_PERSECOND_POOL_SIZE", "10", Nothing(POOL)),
    variable("REDIS_PERSECOND_AUTH", "", Makes("per_second.store")),
    variable("REDIS_PERSECOND_TLS", "false", Makes("per_second.store")),
    variable("REDIS_SENTINEL_AUTH", "", Makes("redis.sentinel")),
    variable("REDIS_PERSECOND_SENTINEL_AUTH", "", Makes("per_second.redis.sentinel")),
    variable("REDIS_PERSECOND_PIPELINE_WINDOW", "0", Nothing(PIPELINED)),
    variable("REDIS_PERSECOND_PIPELINE_LIMIT", "0", Nothing(PIPELINED)),
    variable("REDIS_PERSECOND_CLUSTER_PIPELINE_PARALLELISM", "1", Nothing("servers are always asked in parallel")),
    variable(
        "REDIS_HEALTH_CHECK_ACTIVE_CONNECTION",
        "false",
        Nothing("a store that is away is no reason to send callers elsewhere: /readyz and the metrics tell of it"),
    ),
    variable("REDIS_TIMEOUT", "10s", Makes("redis.connect_timeout, when it is set")),
    variable("REDIS_PERSECOND_TIMEOUT", "10s", Makes("per_second.redis.connect_timeout, when it is set")),
    variable("REDIS_POOL_ON_EMPTY_BEHAVIOR", "WAIT", Nothing(POOL)),
    variable("REDIS_PERSECOND_POOL_ON_EMPTY_BEHAVIOR", "WAIT", Nothing(POOL)),
    variable("REDIS_STARTUP_INITIAL_INTERVAL", "1s", Nothing(STARTUP)),
    variable("REDIS_STARTUP_MAX_INTERVAL", "30s", Nothing(STARTUP)),
    variable("REDIS_STARTUP_MAX_ELAPSED_TIME", "0", Nothing(STARTUP)),
    variable("MEMCACHE_HOST_PORT", "", Nothing(MEMCACHED)),
    variable("MEMCACHE_MAX_IDLE_CONNS", "2", Nothing(MEMCACHED)),
    variable("MEMCACHE_SRV", "", Nothing(MEMCACHED)),
    variable("MEMCACHE_SRV_REFRESH", "0", Nothing(MEMCACHED)),
    variable("MEMCACHE_TLS", "false", Nothing(MEMCACHED)),
    variable("MEMCACHE_TLS_CLIENT_CERT", "", Nothing(MEMCACHED)),
    variable("MEMCACHE_TLS_CLIENT_KEY", "", Nothing(MEMCACHED)),
    variable("MEMCACHE_TLS_CACERT", "", Nothing(MEMCACHED)),
    variable("MEMCACHE_TLS_SKIP_HOSTNAME_VERIFICATION", "false", Nothing(MEMCACHED)),
    variable("SHADOW_MODE", "false", Is("decisions.shadow_mode", values::flag)),
    variable("QUOTA_MODE", "false", Is("decisions.quota_mode", values::flag)),
    variable("RESPONSE_DYNAMIC_METADATA", "false", Is("response.dynamic_metadata", values::flag)),
    variable("MERGE_DOMAIN_CONFIG", "false", Is("rules.merge_domains", values::flag)),
    variable("TRACING_ENABLED", "false", Is("telemetry.otlp.traces", values::flag)),
    variable("TRACING_SERVICE_NAME", "RateLimit", Is("telemetry.otlp.service_name", values::text)),
    variable("TRACING_SERVICE_NAMESPACE", "", Is("telemetry.otlp.service_namespace", values::text)),
    variable("TRACING_SERVICE_INSTANCE_ID", "", Is("telemetry.otlp.service_instance_id", values::text)),
    variable("TRACING_EXPORTER_PROTOCOL", "http", Makes("telemetry.otlp.protocol, telemetry.otlp.endpoint")),
    variable("TRACING_SAMPLING_RATE", "1", Is("telemetry.otlp.sample_ratio", values::ratio)),
];
