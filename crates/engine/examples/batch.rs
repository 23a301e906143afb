//! A batch job that sends mails no faster than its limit allows, with the standard library only.
//!
//! ```console
//! $ cargo run -p sluicegate-engine --example batch
//! ```
#![allow(clippy::expect_used, reason = "an example stops on the first error")]

use std::{thread, time::Instant};

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

/// Takes a hit of a host's limit, and sleeps before that as long as the limit demands.
///
/// If several threads wait for the same limit, one of them takes the hit, and the others wait again.
fn wait_for_hit(limiter: &RateLimiter, host: &str) {
    loop {
        let verdict = limiter.check("mail", &[("host", host)]);
        if !verdict.is_denied() {
            return;
        }
        // There is no time if the limit can never allow the cost, for instance a limit of 0.
        let wait = verdict.retry_after().expect("the limit allows no mail at all");
        thread::sleep(wait.duration());
    }
}
