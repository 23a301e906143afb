//! [`KeepAlive`]: detects connections whose caller has disappeared.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use h2::{Ping, PingPong};
use tokio::time::{Instant, Sleep, sleep_until};

/// Sends a ping on a connection without new calls, and waits for its reply.
pub(super) struct KeepAlive {
    pings: PingPong,
    interval: Duration,
    timeout: Duration,
    /// The time of the next ping, or the end of the wait for a reply.
    timer: Pin<Box<Sleep>>,
    waits_for_reply: bool,
}

impl KeepAlive {
    pub(super) fn new(pings: PingPong, interval: Duration, timeout: Duration) -> Self {
        let timer = Box::pin(sleep_until(Instant::now() + interval));
        Self { pings, interval, timeout, timer, waits_for_reply: false }
    }

    /// Completes when a ping was not answered in time. `last_call` is the time of the last new call.
    pub(super) fn poll(&mut self, context: &mut Context<'_>, last_call: Instant) -> Poll<()> {
        loop {
            if self.waits_for_reply && self.pings.poll_pong(context).is_ready() {
                self.waits_for_reply = false;
                self.timer.as_mut().reset(Instant::now() + self.interval);
            }
            ready!(self.timer.as_mut().poll(context));
            if self.waits_for_reply {
                return Poll::Ready(());
            }
            let next = last_call + self.interval;
            if next > Instant::now() {
                self.timer.as_mut().reset(next);
                continue;
            }
            // An error means that the connection is being closed.
            self.waits_for_reply = self.pings.send_ping(Ping::opaque()).is_ok();
            let wait = if self.waits_for_reply { self.timeout } else { self.interval };
            self.timer.as_mut().reset(Instant::now() + wait);
        }
    }
}
