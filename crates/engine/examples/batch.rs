//! A batch job that sends mails no faster than its limit allows, with the standard library only.
//!
//! ```console
//! $ cargo run -p sluicegate-engine --example batch
//! ```
#![allow(clippy::expect_used, reason = "an example stops on the first error")]

use std::time::{Duration, Instant};

use sluicegate_engine::RateLimiter;

/// Ten mails a second to each host. The algorithm spaces them evenly: `burst` mails are allowed at once.
const RULES: &str = "
domain: mail
descriptors:
- key: host
  rate_limit: { unit: second, requests_per_unit: 10, algorithm: gcra, burst: 3 }
";

fn main() {
    let limiter = RateLimiter::from_rules(RULES).expect("valid rules");
    let started = Instant::now();
    for mail in 1..=10 {
        wait_for_hit(&limiter, "example.com");
        println!("{:.1} s: mail {mail}", started.elapsed().as_secs_f64());
    }
}

/// Takes a hit of a host's limit, and waits before that as long as the limit demands.
///
/// If several threads wait for the same limit, they take their hits in the order of their arrival.
fn wait_for_hit(limiter: &RateLimiter, host: &str) {
    let verdict = limiter.blocking_check("mail", &[("host", host)], Duration::from_secs(60));
    // A limit of 0, for instance.
    assert!(!verdict.is_denied(), "the limit allows no mail within a minute");
}
