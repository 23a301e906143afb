//! [`IpPrefix`]: the network prefixes by which addresses are counted.
//!
//! A single host usually controls a whole /64 of IPv6 addresses, and one address has several textual forms.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Number of leading bits that distinguish one caller's address from another's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IpPrefix {
    /// Prefix length of IPv4 addresses, from 1 to 32.
    pub v4: u8,
    /// Prefix length of IPv6 addresses, from 1 to 128.
    pub v6: u8,
}

impl Default for IpPrefix {
    /// Returns /32 for IPv4, which is the whole address, and for IPv6 the /64 of a subnet (RFC 4291).
    fn default() -> Self {
        Self { v4: 32, v6: 64 }
    }
}

impl IpPrefix {
    /// Returns the network of an address in canonical form: `203.0.113.7`, `10.1.0.0/16`, `2001:db8::/64`.
    ///
    /// An IPv4-mapped IPv6 address (`::ffff:203.0.113.7`) is treated as the IPv4 address. Brackets and a zone
    /// (`[fe80::1%eth0]`) are removed, and so is a port (`203.0.113.7:443`, `[2001:db8::1]:443`). Returns `None` if `value`
    /// is not an address.
    #[must_use]
    pub fn network(self, value: &str) -> Option<String> {
        let text = value.trim();
        let address = parse_address(text).or_else(|| parse_address(split_port(text)?))?;
        Some(match address.to_canonical() {
            IpAddr::V4(address) => {
                let bits = u32::from(address) & u32::MAX.checked_shl(32 - u32::from(self.v4.min(32))).unwrap_or(0);
                format_network(Ipv4Addr::from(bits).into(), self.v4, 32)
            }
            IpAddr::V6(address) => {
                let bits = u128::from(address) & u128::MAX.checked_shl(128 - u32::from(self.v6.min(128))).unwrap_or(0);
                format_network(Ipv6Addr::from(bits).into(), self.v6, 128)
            }
        })
    }
}

fn format_network(address: IpAddr, prefix: u8, whole: u8) -> String {
    if prefix < whole { format!("{address}/{prefix}") } else { address.to_string() }
}

/// Returns an address without its port and without the brackets around it. Another text is returned unchanged.
///
/// An IPv6 address without brackets has no port: its last group could be one.
#[must_use]
pub fn without_port(text: &str) -> &str {
    if parse_address(text).is_some() {
        return without_brackets(text);
    }
    match split_port(text) {
        Some(host) if !host.contains(':') || parse_address(host).is_some() => without_brackets(host),
        _ => text,
    }
}

/// Returns the part before the last colon if a port follows, which may be empty as in URLs.
fn split_port(text: &str) -> Option<&str> {
    let (host, port) = text.rsplit_once(':')?;
    let has_digits = port.bytes().all(|byte| byte.is_ascii_digit());
    (has_digits && (port.is_empty() || port.parse::<u16>().is_ok())).then_some(host)
}

/// Parses an address, which may have brackets and a zone.
fn parse_address(text: &str) -> Option<IpAddr> {
    let text = without_brackets(text);
    let address = match text.split_once('%') {
        Some((address, _zone)) => address,
        None => text,
    };
    address.parse().ok()
}

fn without_brackets(text: &str) -> &str {
    text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_is_removed_only_where_it_cannot_be_part_of_the_address() {
        for (text, expected) in [
            ("10.0.0.1:9", "10.0.0.1"),
            ("10.0.0.1", "10.0.0.1"),
            ("[::1]:4711", "::1"),
            ("[::1]", "::1"),
            ("[::1]:", "::1"),
            ("::1", "::1"),
            ("2001:db8::1", "2001:db8::1"),
            ("2001:db8::1:443", "2001:db8::1:443"),
            ("2001:db8:0:0:0:0:0:1:443", "2001:db8:0:0:0:0:0:1"),
            ("fe80::1%eth0", "fe80::1%eth0"),
            ("[fe80::1%eth0]:443", "fe80::1%eth0"),
            ("localhost:443", "localhost"),
            ("localhost", "localhost"),
            ("2001:db8::12345", "2001:db8::12345"),
            ("/run/envoy.sock", "/run/envoy.sock"),
            ("", ""),
        ] {
            assert_eq!(without_port(text), expected, "{text}");
        }
    }

    #[test]
    fn all_textual_forms_of_an_address_have_the_same_network() {
        for (text, expected) in [
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
            ("203.0.113.7:443", Some("203.0.113.7")),
            ("203.0.113.7:0", Some("203.0.113.7")),
            (" 203.0.113.7:65535 ", Some("203.0.113.7")),
            ("[203.0.113.7]:443", Some("203.0.113.7")),
            ("[2001:db8::1]:443", Some("2001:db8::/64")),
            ("[fe80::1%eth0]:443", Some("fe80::/64")),
            ("[::ffff:203.0.113.7]:443", Some("203.0.113.7")),
            ("::ffff:203.0.113.7:443", Some("203.0.113.7")),
            ("2001:db8::1:443", Some("2001:db8::/64")),
            ("203.0.113.7:65536", None),
            ("203.0.113.7:+80", None),
            ("203.0.113.7:80:80", None),
            ("203.0.113.7:http", None),
            ("[2001:db8::1]443", None),
            ("[2001:db8::1", None),
            ("localhost:443", None),
            (":443", None),
            ("localhost", None),
            ("", None),
        ] {
            assert_eq!(IpPrefix::default().network(text).as_deref(), expected, "{text}");
        }
        let wide = IpPrefix { v4: 16, v6: 1 };
        assert_eq!(wide.network("10.1.2.3").as_deref(), Some("10.1.0.0/16"));
        assert_eq!(wide.network("ffff::1").as_deref(), Some("8000::/1"));
        assert_eq!(IpPrefix { v4: 32, v6: 128 }.network("::1").as_deref(), Some("::1"));
    }
}
