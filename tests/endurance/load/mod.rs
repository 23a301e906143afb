//! [`Load`]: callers of every feature, on a thread of their own.

mod checks;
mod connections;
mod http;
mod operator;
pub(crate) mod slots;
mod stream;

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread::JoinHandle,
    time::Duration,
};

use tokio::time::{MissedTickBehavior, interval};

pub(crate) use self::http::http;
use crate::{observer::Observer, samples::Sampler, site::Target, support::raw_client::Client};

/// A pause of the load's own thread that is longer cannot be blamed on the service. Calls to Redis time out after it.
const STALL: Duration = Duration::from_millis(250);

/// Callers that run until the value is dropped.
pub(crate) struct Load {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

/// An instance with a connection to it.
#[derive(Clone)]
struct Instance {
    target: Target,
    client: Client,
}

/// The observer and the connections that all callers share.
#[derive(Clone)]
struct Context {
    observer: Arc<Observer>,
    redis: Arc<[Instance]>,
    peers: Arc<[Instance]>,
}

impl Load {
    /// Starts all callers, and the task that takes samples.
    pub(crate) fn start(redis: Vec<Target>, peers: Vec<Target>, observer: Arc<Observer>, sampler: Sampler) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let (redis, peers) = (connect(redis).await, connect(peers).await);
                let context = Context { observer, redis, peers };
                checks::start(&context);
                slots::start(&context);
                stream::start(&context);
                connections::start(&context);
                operator::start(&context);
                tokio::spawn(find_stalls(context));
                tokio::spawn(sampler.run());
                while !stopped.load(Relaxed) {
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            });
        });
        Self { stop, thread: Some(thread) }
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// Reports the times in which this thread does not run, because the machine is too busy or suspended.
async fn find_stalls(context: Context) {
    let mut last = context.observer.now();
    loop {
        tokio::time::sleep(STALL / 5).await;
        let now = context.observer.now();
        if now - last > STALL.as_millis() as u64 {
            context.observer.stalled(last);
        }
        last = now;
    }
}

async fn connect(targets: Vec<Target>) -> Arc<[Instance]> {
    let mut instances = Vec::new();
    for target in targets {
        let client = Client::connect(target.endpoint.clone()).await.unwrap();
        instances.push(Instance { target, client });
    }
    instances.into()
}

impl Context {
    /// Begins `rate` calls per second, each in a task of its own. A call does not wait for the previous ones. Calls that
    /// a busy machine prevented are not made up for.
    fn every_second<F: Future<Output = ()> + Send + 'static>(
        &self,
        rate: u64,
        mut call: impl FnMut(u64, Self) -> F + Send + 'static,
    ) {
        let context = self.clone();
        tokio::spawn(async move {
            let mut ticks = interval(Duration::from_secs(1) / rate as u32);
            ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
            for number in 0.. {
                ticks.tick().await;
                tokio::spawn(call(number, context.clone()));
            }
        });
    }

    /// Repeats a call without an end, with a pause after each.
    fn repeat<F: Future<Output = ()> + Send + 'static>(
        &self,
        pause: Duration,
        mut call: impl FnMut(u64, Self) -> F + Send + 'static,
    ) {
        let context = self.clone();
        tokio::spawn(async move {
            for number in 0.. {
                call(number, context.clone()).await;
                tokio::time::sleep(pause).await;
            }
        });
    }

    fn all(&self) -> impl Iterator<Item = &Instance> {
        self.redis.iter().chain(self.peers.iter())
    }
}
