//! [`Settings`] of the exchange with other instances.

use std::{net::SocketAddr, num::NonZeroU32, path::PathBuf, time::Duration};

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The other instances of the service.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(default)]
pub struct Settings {
    /// Number of instances that share the store. With `on_error: local` and without `peers`, each instance applies its
    /// share of a limit.
    pub instances: NonZeroU32,
    /// Instances to exchange counted hits with, as `host:port`, in a list or separated by commas. A DNS name stands for
    /// all of its addresses and is resolved repeatedly. The own address may be among them. Without a port, the port of
    /// `addr` is used.
    #[serde(serialize_with = "write_addresses", deserialize_with = "read_addresses")]
    #[cfg_attr(test, schemars(schema_with = "address_schema"))]
    pub peers: Vec<String>,
    /// Address on which other instances call this one. It is used only with `peers`.
    pub addr: SocketAddr,
    /// Interval at which counted hits are sent to other instances, ± 10%.
    #[serde(with = "sluicegate_duration::Text")]
    pub sync: Duration,
    /// Maximum time for which the start waits for a copy of the counters of another instance.
    #[serde(with = "sluicegate_duration::Text")]
    pub join_timeout: Duration,
    /// Certificates for mutual TLS between instances.
    pub tls: TlsSettings,
    /// Exchange hits without TLS. Every program that reaches `addr` can then change counters and overrides.
    pub allow_plaintext: bool,
}

/// Certificates for mutual TLS between instances. They are reloaded when their files change.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(default)]
pub struct TlsSettings {
    /// PEM file with the certificate of this instance and its chain, for both directions.
    pub cert_file: Option<PathBuf>,
    /// PEM file with the key of the certificate.
    pub key_file: Option<PathBuf>,
    /// PEM file with the CA certificates of all instances.
    pub ca_file: Option<PathBuf>,
    /// DNS name that the certificates of all instances must contain. Without it, a called instance must have the host in
    /// `peers`, and a calling instance may have any certificate of the CA.
    pub server_name: Option<String>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            instances: NonZeroU32::MIN,
            peers: Vec::new(),
            addr: SocketAddr::from(([0, 0, 0, 0], 8083)),
            sync: Duration::from_millis(100),
            join_timeout: Duration::from_secs(5),
            tls: TlsSettings::default(),
            allow_plaintext: false,
        }
    }
}

impl Settings {
    /// Returns whether this instance exchanges hits with others.
    #[must_use]
    pub const fn has_peers(&self) -> bool {
        !self.peers.is_empty()
    }

    /// Returns the number of instances among which a limit is divided while each instance counts alone.
    #[must_use]
    pub const fn divisor(&self) -> NonZeroU32 {
        if self.has_peers() { NonZeroU32::MIN } else { self.instances }
    }

    /// Returns a problem of the settings, or `None` if they are valid.
    #[must_use]
    pub fn problem(&self) -> Option<&'static str> {
        if !self.is_secured() {
            return Some(
                "cluster.peers needs cluster.tls.cert_file, cluster.tls.key_file and cluster.tls.ca_file, or \
                 cluster.allow_plaintext = true without them",
            );
        }
        if self.sync < Duration::from_millis(10) || self.sync > Duration::from_secs(10) {
            return Some("cluster.sync must be between 10ms and 10s");
        }
        None
    }

    /// Returns whether the TLS settings are complete: all files, or none if plaintext is allowed or there are no peers.
    fn is_secured(&self) -> bool {
        let TlsSettings { cert_file, key_file, ca_file, server_name } = &self.tls;
        let files = [cert_file, key_file, ca_file].map(Option::is_some);
        match files {
            [true, true, true] => true,
            [false, false, false] => server_name.is_none() && (self.allow_plaintext || !self.has_peers()),
            _ => false,
        }
    }
}

fn write_addresses<S: Serializer>(addresses: &[String], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&addresses.join(","))
}

/// Reads a list, or a text with commas as an environment variable contains it.
fn read_addresses<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Addresses {
        Text(String),
        List(Vec<String>),
    }
    let addresses = match Addresses::deserialize(deserializer)? {
        Addresses::Text(text) => text.split(',').map(str::to_owned).collect(),
        Addresses::List(list) => list,
    };
    let trimmed = addresses.into_iter().map(|address| address.trim().to_owned());
    Ok(trimmed.filter(|address| !address.is_empty()).collect())
}

#[cfg(test)]
fn address_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
    schemars::json_schema!({
        "type": ["string", "array"],
        "items": { "type": "string" },
        "examples": ["sluicegate-peers:8083", "10.0.0.1:8083,10.0.0.2:8083"]
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_schema_of_peers_describes_a_text_or_a_list_of_texts() {
        let schema = serde_json::to_value(schemars::schema_for!(Settings)).unwrap();
        let peers = &schema["properties"]["peers"];
        assert_eq!(peers["type"], serde_json::json!(["string", "array"]));
        assert_eq!(peers["items"]["type"], "string");
    }
}
