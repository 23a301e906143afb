//! [`CallExecutor`]: drops responses that the caller does not read.
//!
//! A caller can open no flow-control window for its calls. Hyper then holds the responses until the window opens, and
//! HTTP/2 has no timeout for this. Hyper polls the body of a response again when it has sent the last data, so data waits
//! if the call is pending and the body was not polled after it. A window that is open, but smaller than the data, is not
//! noticed: h2 then holds the rest of the data.
//!
//! All calls of a worker run on its thread, so their common state is in variables of the thread. A call that is answered
//! in its first poll, as nearly all are, needs no timer.

use std::{
    cell::{Cell, OnceCell},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use hyper::rt::Executor;
use pin_project_lite::pin_project;
use tokio::time::{Sleep, sleep};

use super::connection::CallerErrors;

thread_local! {
    /// The last poll of the body of the call that is being polled.
    static BODY: Cell<Body> = const { Cell::new(Body::NotPolled) };
    /// The timeout, and the counter of dropped responses.
    static WORKER: OnceCell<(Duration, Arc<CallerErrors>)> = const { OnceCell::new() };
}

/// Sets the timeout for the calls of this thread. The first call wins.
pub(super) fn set_timeout(timeout: Duration, errors: Arc<CallerErrors>) {
    WORKER.with(|worker| drop(worker.set((timeout, errors))));
}

/// Result of the last poll of a body.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Body {
    NotPolled,
    /// It returned data, which hyper has to send.
    Data,
    /// It returned no data.
    NoData,
}

/// Records the result of a poll of the body of the call that is being polled.
pub(super) fn record_poll(has_data: bool) {
    BODY.set(if has_data { Body::Data } else { Body::NoData });
}

/// Executor for the calls of connections.
#[derive(Clone)]
pub(super) struct CallExecutor;

impl<F: Future<Output = ()> + Send + 'static> Executor<F> for CallExecutor {
    fn execute(&self, call: F) {
        tokio::spawn(Call { call, end: None });
    }
}

pin_project! {
    /// A call that ends when data has waited for the caller for too long.
    struct Call<F> {
        #[pin]
        call: F,
        end: Option<Pin<Box<Sleep>>>,
    }
}

impl<F: Future<Output = ()>> Future for Call<F> {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let this = self.project();
        BODY.set(Body::NotPolled);
        if this.call.poll(context).is_ready() {
            return Poll::Ready(());
        }
        WORKER.with(|worker| {
            let Some((timeout, errors)) = worker.get() else {
                return Poll::Pending;
            };
            match BODY.get() {
                Body::Data => *this.end = Some(Box::pin(sleep(*timeout))),
                Body::NoData => *this.end = None,
                Body::NotPolled => {}
            }
            let is_over = this.end.as_mut().is_some_and(|end| end.as_mut().poll(context).is_ready());
            if !is_over {
                return Poll::Pending;
            }
            // Hyper resets the stream of a call that is dropped.
            errors.record_unread();
            Poll::Ready(())
        })
    }
}
