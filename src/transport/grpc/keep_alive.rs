//! [`KeepAlive`]: detects that the caller of a connection has disappeared.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use h2::{Ping, PingPong};
use tokio::time::{Instant, Sleep, sleep_until};

/// The pings on a connection without new calls, and the wait for each reply.
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

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use tokio::time::{advance, sleep};

    use super::*;

    const INTERVAL: Duration = Duration::from_secs(60);
    const TIMEOUT: Duration = Duration::from_secs(20);

    /// Polls once. Returns whether a reply is awaited, and the time of the timer.
    async fn poll(keep_alive: &mut KeepAlive, last_call: Instant) -> (bool, Instant) {
        let poll = poll_fn(|context| Poll::Ready(keep_alive.poll(context, last_call))).await;
        assert!(poll.is_pending());
        (keep_alive.waits_for_reply, keep_alive.timer.deadline())
    }

    #[tokio::test(start_paused = true)]
    async fn a_ping_follows_an_interval_without_calls_and_replies() {
        let (caller, service) = tokio::io::duplex(4_096);
        let caller = tokio::spawn(async move {
            let (_calls, connection) = h2::client::handshake(caller).await.unwrap();
            let _ = connection.await;
        });
        let mut connection = h2::server::handshake(service).await.unwrap();
        let pings = connection.ping_pong().unwrap();
        let serving = tokio::spawn(async move { while connection.accept().await.is_some() {} });
        let mut keep_alive = KeepAlive::new(pings, INTERVAL, TIMEOUT);
        let last_call = Instant::now() + INTERVAL / 2;
        advance(INTERVAL).await;
        assert_eq!(poll(&mut keep_alive, last_call).await, (false, last_call + INTERVAL));
        advance(INTERVAL).await;
        assert_eq!(poll(&mut keep_alive, last_call).await, (true, Instant::now() + TIMEOUT));
        // The caller replies.
        sleep(TIMEOUT / 2).await;
        assert_eq!(poll(&mut keep_alive, last_call).await, (false, Instant::now() + INTERVAL));
        serving.abort();
        caller.abort();
    }
}
