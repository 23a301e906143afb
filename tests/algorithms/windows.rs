//! Windows of the calendar in real processes whose clocks are shifted.

use std::{fs, path::Path};

use crate::support::{
    Server, descriptor, fake_clock,
    raw_client::{Client, Request},
    request_for, rules, wait_for_async,
};

const RULES: &str = "
domain: d
descriptors:
- key: month
  rate_limit: {unit: month, requests_per_unit: 3, window: calendar, zone: Europe/Berlin}
- key: day
  rate_limit: {unit: day, requests_per_unit: 3, window: calendar, zone: Europe/Berlin}
- key: renewal
  rate_limit: {unit: month, requests_per_unit: 3, window: calendar, zone: Europe/Berlin, day: 31, at: '06:00'}
";

/// A service with counters in memory and a clock that the test sets.
struct Shifted {
    server: Server,
    client: Client,
    folder: tempfile::TempDir,
}

impl Shifted {
    async fn start(clock: &str) -> Self {
        let folder = rules(&[("d.yaml", RULES)]);
        let file = folder.path().join("clock");
        set_clock(&file, clock);
        let server = Server::builder()
            .rules(folder.path())
            .env("LD_PRELOAD", &fake_clock())
            .env("FAKETIME_TIMESTAMP_FILE", file.to_str().unwrap())
            .env("FAKETIME_CACHE_DURATION", "1")
            .env("FAKETIME_DONT_FAKE_MONOTONIC", "1")
            .start();
        let client = server.client().await;
        Self { server, client, folder }
    }

    /// Moves the clock, and waits until the service has the reset of `key` in this number of seconds, or a few less.
    async fn set(&self, clock: &str, key: &str, reset: i64) {
        set_clock(&self.folder.path().join("clock"), clock);
        wait_for_async("the service to read its clock", async || {
            let seconds = self.reset(key).await;
            (reset - 20..=reset).contains(&seconds).then_some(())
        })
        .await;
    }

    async fn reset(&self, key: &str) -> i64 {
        let peek = Request::new("d").descriptor(descriptor(&[(key, "a")]).hits(0));
        let answer = self.client.check(peek).await.unwrap();
        answer.0.statuses[0].duration_until_reset.unwrap().seconds
    }

    async fn allows(&self, key: &str) -> bool {
        self.client.check(request_for("d", &[(key, "a")])).await.unwrap().allowed()
    }

    async fn use_up(&self, key: &str) {
        for expected in [true, true, true, false] {
            assert_eq!(self.allows(key).await, expected, "{key}");
        }
    }
}

fn set_clock(file: &Path, clock: &str) {
    fs::write(file, format!("@{clock}\n")).unwrap();
}

const DAY: i64 = 86_400;

#[tokio::test]
async fn months_and_days_end_with_the_local_calendar_across_a_change_of_clocks() {
    // 13:00 in Berlin, the day before clocks go forward.
    let service = Shifted::start("2026-03-28 12:00:00").await;
    service.set("2026-03-28 12:00:00", "month", 3 * DAY + 10 * 3_600).await;
    for key in ["month", "day", "renewal"] {
        service.use_up(key).await;
    }
    // The day of the change has 23 hours.
    service.set("2026-03-28 22:59:30", "day", 30).await;
    assert!(!service.allows("day").await);
    service.set("2026-03-28 23:00:00", "day", 23 * 3_600).await;
    assert!(service.allows("day").await);
    assert!(!service.allows("month").await);
    // The last seconds of March by the local clock, which is two hours ahead of UTC now.
    service.set("2026-03-31 21:59:30", "month", 30).await;
    assert!(!service.allows("month").await);
    service.set("2026-03-31 22:00:00", "month", 30 * DAY).await;
    assert!(service.allows("month").await);
    // The month from the 31st at six has begun in the morning before.
    assert!(service.allows("renewal").await);
    assert!((29 * DAY..30 * DAY).contains(&service.reset("renewal").await), "until the 30th of April");
    assert!(service.server.log().contains("ready") || !service.server.log().contains("ERROR"));
}
