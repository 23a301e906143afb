//! Addresses counted by their prefix: one machine owns a /64 of IPv6, and writes an address in many ways.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// How many leading bits of an address tell one caller from another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IpPrefix {
    /// Of IPv4, from 1 to 32.
    pub v4: u8,
    /// Of IPv6, from 1 to 128.
    pub v6: u8,
}

impl Default for IpPrefix {
    /// A whole IPv4 address; of IPv6 the /64 that a subnet has (RFC 4291).
    fn default() -> Self {
        Self { v4: 32, v6: 64 }
    }
}

impl IpPrefix {
    /// The network that an address is in, in its one canonical form: `203.0.113.7`, `10.1.0.0/16`, `2001:db8::/64`. An
    /// IPv4 address that is written as IPv6 (`::ffff:203.0.113.7`) is the IPv4 address. Brackets and a zone
    /// (`[fe80::1%eth0]`) are let go. `None` for what is no address.
    #[must_use]
    pub fn network(self, value: &str) -> Option<String> {
        let bare = value.trim();
        let bare = bare.strip_prefix('[').and_then(|bare| bare.strip_suffix(']')).unwrap_or(bare);
        let bare = bare.split_once('%').map_or(bare, |(address, _)| address);
        Some(match bare.parse::<IpAddr>().ok()?.to_canonical() {
            IpAddr::V4(address) => {
                let bits = u32::from(address) & u32::MAX.checked_shl(32 - u32::from(self.v4.min(32))).unwrap_or(0);
                written(Ipv4Addr::from(bits).into(), self.v4, 32)
            }
            IpAddr::V6(address) => {
                let bits = u128::from(address) & u128::MAX.checked_shl(128 - u32::from(self.v6.min(128))).unwrap_or(0);
                written(Ipv6Addr::from(bits).into(), self.v6, 128)
            }
        })
    }
}

fn written(address: IpAddr, prefix: u8, whole: u8) -> String {
    if prefix < whole { format!("{address}/{prefix}") } else { address.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_way_to_write_an_address_is_one_caller() {
        for (written, expected) in [
            ("203.0.113.7", Some("203.0.113.7")),
            ("::ffff:203.0.113.7", Some("203.0.113.7")),
            ("::ffff:cb00:7107", Some("203.0.113.7")),
            ("2001:DB8:0:0::1", Some("2001:db8::/64")),
            ("2001:db8::ffff:ffff:ffff:ffff", Some("2001:db8::/64")),
            ("[2001:db8::1]", Some("2001:db8::/64")),
            ("fe80::1%eth0", Some("fe80::/64")),
            (" 203.0.113.7 ", Some("203.0.113.7")),
            ("2001:db8:0:1::1", Some("2001:db8:0:1::/64")),
            ("203.0.113.07", None),
            ("203.0.113.7:443", None),
            ("localhost", None),
            ("", None),
        ] {
            assert_eq!(IpPrefix::default().network(written).as_deref(), expected, "{written}");
        }
        let wide = IpPrefix { v4: 16, v6: 1 };
        assert_eq!(wide.network("10.1.2.3").as_deref(), Some("10.1.0.0/16"));
        assert_eq!(wide.network("ffff::1").as_deref(), Some("8000::/1"));
        assert_eq!(IpPrefix { v4: 32, v6: 128 }.network("::1").as_deref(), Some("::1"));
    }
}
