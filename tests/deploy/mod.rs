//! Deployment: charts, images, gateways, and replacing envoyproxy/ratelimit.

/// The chart, the manifests and the compose files.
mod charts;
/// Envoy Gateway: the output of its translator, and an Envoy configured by it.
mod envoy_gateway;
/// In place of envoyproxy/ratelimit, with its environment variables.
mod envoyproxy_settings;
/// The contents of the container image, as any user.
mod image;
