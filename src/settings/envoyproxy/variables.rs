//! [`VARIABLES`]: all variables of envoyproxy/ratelimit (`settings.go` on main of July 2026, and the two `…_AUTH_FILE` that
//! were proposed in September, pull request 1240) and their effects.

use super::values::{self, Parser};

/// A variable of envoyproxy/ratelimit.
pub struct Variable {
    /// Name of the variable.
    pub name: &'static str,
    /// Default in envoyproxy/ratelimit; empty if there is none.
    pub default: &'static str,
    /// Effect of the variable on this service.
    pub effect: Effect,
}

/// Effect of a variable on this service.
pub enum Effect {
    /// The variable is one setting. The parser converts its value.
    Setting(&'static str, Parser),
    /// The variable determines these settings together with other variables.
    Combined(&'static str),
    /// The variable has no effect, for this reason.
    Ignored(&'static str),
}

use Effect::{Combined, Ignored, Setting};

const RETRIES: &str = "pauses between connection attempts grow exponentially, with a random reduction of up to half";
const SRV: &str = "MEMCACHE_HOST_PORT lists the servers";
const PIPELINED: &str = "calls are always pipelined, and the requests of a worker share them";
const POOL: &str = "each worker has one connection to each server, which all its calls share";
const STARTUP: &str = "the service starts without Redis and connects when Redis becomes available";
const WATCHED: &str =
    "changed files and replaced links are both detected; files whose names begin with a dot are ignored";

const fn variable(name: &'static str, default: &'static str, effect: Effect) -> Variable {
    Variable { name, default, effect }
}

/// All variables, in the order of the documentation of envoyproxy/ratelimit.
pub const VARIABLES: &[Variable] = &[
    variable("HOST", "0.0.0.0", Combined("http.addr")),
    variable("PORT", "8080", Combined("http.addr")),
    variable("DEBUG_HOST", "0.0.0.0", Combined("http.debug_addr")),
    variable("DEBUG_PORT", "6070", Combined("http.debug_addr")),
    variable("GRPC_UDS", "", Setting("grpc.uds", values::text)),
    variable("GRPC_HOST", "0.0.0.0", Combined("grpc.addr")),
    variable("GRPC_PORT", "8081", Combined("grpc.addr")),
    variable("GRPC_MAX_CONNECTION_AGE", "24h", Setting("grpc.max_connection_age", values::age)),
    variable("GRPC_MAX_CONNECTION_AGE_GRACE", "1h", Setting("grpc.max_connection_age_grace", values::age)),
    variable("GRPC_SERVER_USE_TLS", "false", Combined("grpc.tls")),
    variable("GRPC_SERVER_TLS_CERT", "", Combined("grpc.tls.cert_file")),
    variable("GRPC_SERVER_TLS_KEY", "", Combined("grpc.tls.key_file")),
    variable("GRPC_CLIENT_TLS_CACERT", "", Combined("grpc.tls.client_ca_file")),
    variable("GRPC_CLIENT_TLS_SAN", "", Combined("grpc.tls.client_name")),
    variable("LOG_LEVEL", "WARN", Setting("telemetry.log.level", values::level)),
    variable("LOG_FORMAT", "text", Setting("telemetry.log.format", values::log_format)),
    variable("CONFIG_TYPE", "FILE", Combined("rules")),
    variable("FORCE_START_WITHOUT_INITIAL_CONFIG", "false", Setting("rules.xds.start_without_rules", values::flag)),
    variable("CONFIG_GRPC_XDS_NODE_ID", "default", Combined("rules.xds.node_id")),
    variable("CONFIG_GRPC_XDS_NODE_METADATA", "", Combined("rules.xds.node_metadata")),
    variable("CONFIG_GRPC_XDS_SERVER_URL", "localhost:18000", Combined("rules.xds.server")),
    variable("CONFIG_GRPC_XDS_SERVER_CONNECT_RETRY_INTERVAL", "3s", Ignored(RETRIES)),
    variable("CONFIG_GRPC_XDS_CLIENT_ADDITIONAL_HEADERS", "", Combined("rules.xds.headers")),
    variable("CONFIG_GRPC_XDS_SERVER_USE_TLS", "false", Combined("rules.xds.server")),
    variable("CONFIG_GRPC_XDS_CLIENT_TLS_CERT", "", Combined("rules.xds.tls.cert_file")),
    variable("CONFIG_GRPC_XDS_CLIENT_TLS_KEY", "", Combined("rules.xds.tls.key_file")),
    variable("CONFIG_GRPC_XDS_SERVER_TLS_CACERT", "", Combined("rules.xds.tls.ca_file")),
    variable("CONFIG_GRPC_XDS_SERVER_TLS_SAN", "", Combined("rules.xds.tls.server_name")),
    variable("XDS_CLIENT_BACKOFF_INITIAL_INTERVAL", "10s", Combined("rules.xds.retry_min, when it is set")),
    variable("XDS_CLIENT_BACKOFF_MAX_INTERVAL", "60s", Combined("rules.xds.retry_max, when it is set")),
    variable("XDS_CLIENT_BACKOFF_RANDOM_FACTOR", "0.5", Ignored(RETRIES)),
    variable("XDS_CLIENT_BACKOFF_JITTER", "true", Ignored(RETRIES)),
    variable("XDS_CLIENT_MAX_MSG_SIZE_IN_BYTES", "", Combined("rules.xds.max_message_bytes, when it is set")),
    variable("USE_DOG_STATSD", "false", Combined("telemetry.statsd.protocol")),
    variable("USE_DOG_STATSD_MOGRIFIERS", "", Combined("telemetry.statsd.name_mappings")),
    variable("USE_STATSD", "true", Combined("telemetry.statsd.addr")),
    variable("STATSD_HOST", "localhost", Combined("telemetry.statsd.addr")),
    variable("STATSD_PORT", "8125", Combined("telemetry.statsd.addr")),
    variable("EXTRA_TAGS", "", Combined("telemetry.statsd.tags")),
    variable("STATS_FLUSH_INTERVAL", "10s", Setting("telemetry.statsd.interval", values::interval)),
    variable("DISABLE_STATS", "false", Combined("telemetry.statsd.addr")),
    variable("USE_PROMETHEUS", "false", Combined("http.metrics_addr")),
    variable("PROMETHEUS_ADDR", ":9090", Combined("http.metrics_addr")),
    variable("PROMETHEUS_PATH", "/metrics", Setting("http.metrics_path", values::path)),
    variable("PROMETHEUS_MAPPER_YAML", "", Setting("telemetry.prometheus.mapping_file", values::text)),
    variable(
        "PROMETHEUS_RESPONSE_TIME_AS_MILLISECONDS",
        "false",
        Setting("telemetry.prometheus.milliseconds", values::flag),
    ),
    variable("RUNTIME_ROOT", "/srv/runtime_data/current", Combined("rules.dir")),
    variable("RUNTIME_SUBDIRECTORY", "", Combined("rules.dir")),
    variable("RUNTIME_APPDIRECTORY", "config", Combined("rules.dir")),
    variable("RUNTIME_IGNOREDOTFILES", "false", Ignored(WATCHED)),
    variable("RUNTIME_WATCH_ROOT", "true", Ignored(WATCHED)),
    variable("EXPIRATION_JITTER_MAX_SECONDS", "300", Combined("redis.expiry_jitter, per_second.redis.expiry_jitter")),
    variable("LOCAL_CACHE_SIZE_IN_BYTES", "0", Setting("deny_cache.max_entries", values::cache_size)),
    variable("NEAR_LIMIT_RATIO", "0.8", Setting("decisions.near_limit_ratio", values::ratio)),
    variable("CACHE_KEY_PREFIX", "", Combined("redis.key_prefix, per_second.redis.key_prefix, memcached.key_prefix")),
    variable("BACKEND_TYPE", "redis", Combined("store")),
    variable("STOP_CACHE_KEY_INCREMENT_WHEN_OVERLIMIT", "false", Setting("rules.charge_all", values::flag)),
    variable("LIMIT_RESPONSE_HEADERS_ENABLED", "false", Setting("response.headers", values::flag)),
    variable("LIMIT_LIMIT_HEADER", "RateLimit-Limit", Setting("response.limit_header", values::header_name)),
    variable(
        "LIMIT_REMAINING_HEADER",
        "RateLimit-Remaining",
        Setting("response.remaining_header", values::header_name),
    ),
    variable("LIMIT_RESET_HEADER", "RateLimit-Reset", Setting("response.reset_header", values::header_name)),
    variable("HEALTHY_WITH_AT_LEAST_ONE_CONFIG_LOADED", "false", Setting("rules.required_for_health", values::flag)),
    variable("REDIS_SOCKET_TYPE", "unix", Combined("store")),
    variable("REDIS_TYPE", "SINGLE", Combined("store")),
    variable("REDIS_URL", "/var/run/nutcracker/ratelimit.sock", Combined("store")),
    variable("REDIS_POOL_SIZE", "10", Ignored(POOL)),
    variable("REDIS_AUTH", "", Combined("store")),
    variable("REDIS_AUTH_FILE", "", Combined("redis.password_file")),
    variable("REDIS_TLS", "false", Combined("store")),
    variable("REDIS_TLS_CLIENT_CERT", "", Combined("redis.tls.cert_file, per_second.redis.tls.cert_file")),
    variable("REDIS_TLS_CLIENT_KEY", "", Combined("redis.tls.key_file, per_second.redis.tls.key_file")),
    variable("REDIS_TLS_CACERT", "", Combined("redis.tls.ca_file, per_second.redis.tls.ca_file")),
    variable(
        "REDIS_TLS_SKIP_HOSTNAME_VERIFICATION",
        "false",
        Combined("redis.tls.verify_name, per_second.redis.tls.verify_name"),
    ),
    variable("REDIS_PIPELINE_WINDOW", "0", Ignored(PIPELINED)),
    variable("REDIS_PIPELINE_LIMIT", "0", Ignored(PIPELINED)),
    variable(
        "REDIS_CLUSTER_PIPELINE_PARALLELISM",
        "1",
        Ignored("calls to several servers are always made in parallel"),
    ),
    variable("REDIS_PERSECOND", "false", Combined("per_second.store")),
    variable("REDIS_PERSECOND_SOCKET_TYPE", "unix", Combined("per_second.store")),
    variable("REDIS_PERSECOND_TYPE", "SINGLE", Combined("per_second.store")),
    variable("REDIS_PERSECOND_URL", "/var/run/nutcracker/ratelimitpersecond.sock", Combined("per_second.store")),
    variable("REDIS_PERSECOND_POOL_SIZE", "10", Ignored(POOL)),
    variable("REDIS_PERSECOND_AUTH", "", Combined("per_second.store")),
    variable("REDIS_PERSECOND_AUTH_FILE", "", Combined("per_second.redis.password_file")),
    variable("REDIS_PERSECOND_TLS", "false", Combined("per_second.store")),
    variable("REDIS_SENTINEL_AUTH", "", Combined("redis.sentinel")),
    variable("REDIS_PERSECOND_SENTINEL_AUTH", "", Combined("per_second.redis.sentinel")),
    variable("REDIS_PERSECOND_PIPELINE_WINDOW", "0", Ignored(PIPELINED)),
    variable("REDIS_PERSECOND_PIPELINE_LIMIT", "0", Ignored(PIPELINED)),
    variable(
        "REDIS_PERSECOND_CLUSTER_PIPELINE_PARALLELISM",
        "1",
        Ignored("calls to several servers are always made in parallel"),
    ),
    variable(
        "REDIS_HEALTH_CHECK_ACTIVE_CONNECTION",
        "false",
        Ignored("an unavailable store does not make an instance unhealthy; /readyz and the metrics report it"),
    ),
    variable("REDIS_TIMEOUT", "10s", Combined("redis.connect_timeout, when it is set")),
    variable("REDIS_PERSECOND_TIMEOUT", "10s", Combined("per_second.redis.connect_timeout, when it is set")),
    variable("REDIS_POOL_ON_EMPTY_BEHAVIOR", "WAIT", Ignored(POOL)),
    variable("REDIS_PERSECOND_POOL_ON_EMPTY_BEHAVIOR", "WAIT", Ignored(POOL)),
    variable("REDIS_STARTUP_INITIAL_INTERVAL", "1s", Ignored(STARTUP)),
    variable("REDIS_STARTUP_MAX_INTERVAL", "30s", Ignored(STARTUP)),
    variable("REDIS_STARTUP_MAX_ELAPSED_TIME", "0", Ignored(STARTUP)),
    variable("MEMCACHE_HOST_PORT", "", Combined("store")),
    variable("MEMCACHE_MAX_IDLE_CONNS", "2", Ignored(POOL)),
    variable("MEMCACHE_SRV", "", Ignored(SRV)),
    variable("MEMCACHE_SRV_REFRESH", "0", Ignored(SRV)),
    variable("MEMCACHE_TLS", "false", Combined("store")),
    variable("MEMCACHE_TLS_CLIENT_CERT", "", Combined("memcached.tls.cert_file")),
    variable("MEMCACHE_TLS_CLIENT_KEY", "", Combined("memcached.tls.key_file")),
    variable("MEMCACHE_TLS_CACERT", "", Combined("memcached.tls.ca_file")),
    variable("MEMCACHE_TLS_SKIP_HOSTNAME_VERIFICATION", "false", Combined("memcached.tls.verify_name")),
    variable("SHADOW_MODE", "false", Setting("decisions.shadow_mode", values::flag)),
    variable("QUOTA_MODE", "false", Setting("decisions.quota_mode", values::flag)),
    variable("RESPONSE_DYNAMIC_METADATA", "false", Setting("response.dynamic_metadata", values::flag)),
    variable("MERGE_DOMAIN_CONFIG", "false", Setting("rules.merge_domains", values::flag)),
    variable("TRACING_ENABLED", "false", Setting("telemetry.otlp.traces", values::flag)),
    variable("TRACING_SERVICE_NAME", "RateLimit", Setting("telemetry.otlp.service_name", values::text)),
    variable("TRACING_SERVICE_NAMESPACE", "", Setting("telemetry.otlp.service_namespace", values::text)),
    variable("TRACING_SERVICE_INSTANCE_ID", "", Setting("telemetry.otlp.service_instance_id", values::text)),
    variable("TRACING_EXPORTER_PROTOCOL", "http", Combined("telemetry.otlp.protocol, telemetry.otlp.endpoint")),
    variable("TRACING_SAMPLING_RATE", "1", Setting("telemetry.otlp.sample_ratio", values::ratio)),
];
