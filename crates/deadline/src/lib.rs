//! [`within`]: a time limit for the answer of another process, which excludes pauses of this one.

use std::{
    future::poll_fn,
    pin::pin,
    task::{Poll, ready},
    time::Duration,
};

use tokio::time::{Instant, sleep};

/// Number of parts into which a time limit is divided. After a pause, the current part begins again.
const PARTS: u32 = 2;
/// Minimum lateness of a timer that counts as a pause of this process.
const MIN_PAUSE: Duration = Duration::from_millis(5);
/// Maximum number of parts that begin again, so that a process which is paused all the time does not wait for ever.
const MAX_PAUSES: u32 = 4;

/// Error returned when there is no answer in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no answer in time")]
pub struct Late;

/// Waits for an answer for at most `max`, without the time for which this process was paused.
///
/// A container with a CPU quota is paused for up to 100 ms at a time. Afterwards, the timers fire before the answers
/// that have arrived meanwhile are read, so a timer alone would blame the other process. After a pause, the current
/// half of `max` begins again, up to four times.
///
/// # Errors
///
/// Returns an error if there is no answer in time.
pub async fn within<F: Future>(max: Duration, answer: F) -> Result<F::Output, Late> {
    let part = max / PARTS;
    let mut answer = pin!(answer);
    let mut timer = pin!(sleep(part));
    let mut remaining_parts = PARTS - 1;
    let mut pauses = 0;
    poll_fn(|context| {
        loop {
            if let Poll::Ready(output) = answer.as_mut().poll(context) {
                return Poll::Ready(Ok(output));
            }
            ready!(timer.as_mut().poll(context));
            let end = timer.deadline();
            let now = Instant::now();
            if now - end >= MIN_PAUSE && pauses < MAX_PAUSES {
                pauses += 1;
                timer.as_mut().reset(now + part);
            } else if remaining_parts > 0 {
                remaining_parts -= 1;
                timer.as_mut().reset(end + part);
            } else {
                return Poll::Ready(Err(Late));
            }
        }
    })
    .await
}

#[cfg(test)]
mod tests {
    use std::{future::pending, thread};

    use super::*;

    const MAX: Duration = Duration::from_millis(200);

    #[tokio::test(start_paused = true)]
    async fn an_answer_is_late_after_the_time() {
        let start = Instant::now();
        assert_eq!(within(MAX, pending::<()>()).await, Err(Late));
        assert_eq!(start.elapsed(), MAX);
        let just_in_time = sleep(MAX - Duration::from_millis(1));
        assert_eq!(within(MAX, just_in_time).await, Ok(()));
        assert_eq!(within(Duration::ZERO, pending::<()>()).await, Err(Late));
        assert_eq!(within(Duration::ZERO, async { 5 }).await, Ok(5));
        assert_eq!(within(Duration::MAX, sleep(MAX)).await, Ok(()));
    }

    /// Waits for an answer that takes `answer` after the process was paused `pauses` times in a row, each time for `MAX`.
    /// The waiting task is polled first after each pause, as if its timer fired before the sockets are read.
    async fn wait(pauses: usize, answer: Duration) -> (Result<(), Late>, Duration) {
        let mut times = 0;
        let mut answered = None;
        let start = Instant::now();
        let result = within(
            MAX,
            poll_fn(|context| {
                let answered = answered.get_or_insert_with(|| Box::pin(sleep(MAX * 100)));
                if times < pauses {
                    times += 1;
                    // Blocks the thread, so that all timers are late.
                    thread::sleep(MAX);
                    if times == pauses {
                        answered.as_mut().reset(Instant::now() + answer);
                    }
                }
                answered.as_mut().poll(context)
            }),
        )
        .await;
        (result, start.elapsed())
    }

    #[tokio::test]
    async fn a_pause_of_the_process_does_not_make_an_answer_late() {
        assert_eq!(wait(1, MAX / 4).await.0, Ok(()));
        assert_eq!(wait(2, MAX / 4).await.0, Ok(()));
    }

    #[tokio::test]
    async fn a_process_without_an_answer_is_late_after_pauses_too() {
        for pauses in [1, 3] {
            assert_eq!(wait(pauses, MAX * 100).await.0, Err(Late), "{pauses} pauses");
        }
        // Only some of many pauses begin a part again: all of them would take 8 s.
        let (result, time) = wait(40, MAX * 100).await;
        assert_eq!(result, Err(Late));
        assert!(time < MAX * 20, "{time:?}");
    }
}
