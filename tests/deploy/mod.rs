//! Deployment: charts, images, gateways, and the replacement of envoyproxy/ratelimit.

/// The chart and the manifests.
mod charts;
/// The Compose files.
mod compose;
/// Envoy Gateway: the output of its translator, and an Envoy with its configuration.
mod envoy_gateway;
/// The replacement of envoyproxy/ratelimit, with its environment variables.
mod envoyproxy_settings;
/// The contents of the container image, run as an arbitrary user.
mod image;
/// Reading, validating and starting manifests.
mod manifests;
/// The parts of a release: licences, SBOM, manual pages, Debian's unit.
mod release;
