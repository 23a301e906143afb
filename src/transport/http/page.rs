//! [`Page`]: a large page that is built once for all callers that wait for it.

use std::{
    sync::{
        Arc, Weak,
        atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use tokio::{
    sync::{Mutex, OwnedMutexGuard},
    time::Instant,
};

use crate::transport::http_server::SharedPage;

/// Maximum number of versions of a page that are in memory, besides the one that is being built.
const MAX_VERSIONS: usize = 2;
/// Age up to which the last version is sent again while the maximum number of versions is in memory. A caller therefore
/// has at least this time to read a page, however many others do not read it.
const MAX_AGE: Duration = Duration::from_secs(5);

/// The versions of a page.
///
/// A caller receives a version that was begun after its request. Only if callers have not read the last two versions,
/// it can be [`MAX_AGE`] older.
#[derive(Default)]
pub(super) struct Page {
    versions: Arc<Mutex<Versions>>,
    /// The number of versions of which the building has begun, including those that failed.
    begun: AtomicU64,
    waiting: AtomicUsize,
}

#[derive(Default)]
struct Versions {
    /// The versions that callers may still read, the newest one last.
    sent: Vec<Version>,
    /// The newest version, while callers wait for it.
    newest: Option<Arc<SharedPage>>,
}

struct Version {
    number: u64,
    begun_at: Instant,
    page: Weak<SharedPage>,
}

/// A caller that waits for a page.
struct Waiting<'a>(&'a AtomicUsize);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

impl Page {
    /// Returns the page, built by `build` on another thread. Returns `None` if that fails.
    pub(super) async fn get(&self, build: impl FnOnce() -> Vec<u8> + Send + 'static) -> Option<Arc<SharedPage>> {
        let begun = self.begun.load(Relaxed);
        self.waiting.fetch_add(1, Relaxed);
        let waiting = Waiting(&self.waiting);
        let mut versions = Arc::clone(&self.versions).lock_owned().await;
        drop(waiting);
        let page = match versions.reusable(begun) {
            Some(page) => page,
            None => {
                let number = self.begun.fetch_add(1, Relaxed) + 1;
                // Callers that leave do not end the building, so each begins at most one.
                let (built, page) = tokio::spawn(add_version(versions, number, build)).await.ok()??;
                versions = built;
                page
            }
        };
        if self.waiting.load(Relaxed) == 0 {
            versions.newest = None;
        }
        Some(page)
    }
}

async fn add_version(
    mut versions: OwnedMutexGuard<Versions>,
    number: u64,
    build: impl FnOnce() -> Vec<u8> + Send + 'static,
) -> Option<(OwnedMutexGuard<Versions>, Arc<SharedPage>)> {
    versions.make_room();
    let begun_at = Instant::now();
    let bytes = tokio::task::spawn_blocking(build).await.ok()?;
    let page = SharedPage::new(bytes);
    versions.sent.push(Version { number, begun_at, page: Arc::downgrade(&page) });
    versions.newest = Some(Arc::clone(&page));
    Some((versions, page))
}

impl Versions {
    /// Returns the newest version if it is new enough for a request that arrived when `begun` versions were begun.
    fn reusable(&mut self, begun: u64) -> Option<Arc<SharedPage>> {
        self.sent.retain(|version| version.page.strong_count() > 0);
        let newest = self.sent.last()?;
        let is_new = newest.number > begun;
        let is_crowded = self.sent.len() >= MAX_VERSIONS && newest.begun_at.elapsed() < MAX_AGE;
        if is_new || is_crowded { newest.page.upgrade() } else { None }
    }

    /// Closes the connections of callers that still read old versions.
    fn make_room(&mut self) {
        self.newest = None;
        let excess = (self.sent.len() + 1).saturating_sub(MAX_VERSIONS);
        for version in self.sent.drain(..excess) {
            let closed = match version.page.upgrade() {
                Some(page) => page.close_readers(),
                None => 0,
            };
            tracing::debug!(closed, "closed connections that did not read a page");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Barrier, atomic::AtomicU8};

    use tokio::time::advance;

    use super::*;

    /// Builds pages that contain their number.
    #[derive(Default)]
    struct Builds(Arc<AtomicU8>);

    impl Builds {
        fn build(&self) -> impl FnOnce() -> Vec<u8> + Send + 'static {
            let builds = Arc::clone(&self.0);
            move || vec![builds.fetch_add(1, Relaxed) + 1]
        }
    }

    #[tokio::test]
    async fn each_request_receives_a_version_that_was_begun_after_it() {
        let (page, builds) = (Page::default(), Builds::default());
        for number in 1..4 {
            assert_eq!(page.get(builds.build()).await.unwrap().bytes(), [number]);
        }
        assert!(page.versions.lock().await.newest.is_none(), "no version is kept without callers");
    }

    #[tokio::test]
    async fn requests_that_wait_share_one_version() {
        let (page, builds) = (Arc::new(Page::default()), Builds::default());
        let barrier = Arc::new(Barrier::new(2));
        let slow = Arc::clone(&barrier);
        let first = builds.build();
        let spawn = |build: Box<dyn FnOnce() -> Vec<u8> + Send>| {
            let page = Arc::clone(&page);
            tokio::spawn(async move { page.get(build).await.unwrap().bytes().to_vec() })
        };
        let building = spawn(Box::new(move || {
            slow.wait();
            first()
        }));
        while page.begun.load(Relaxed) == 0 {
            tokio::task::yield_now().await;
        }
        let waiting: Vec<_> = (0..100).map(|_| spawn(Box::new(builds.build()))).collect();
        while page.waiting.load(Relaxed) < 100 {
            tokio::task::yield_now().await;
        }
        tokio::task::spawn_blocking(move || barrier.wait()).await.unwrap();
        assert_eq!(building.await.unwrap(), [1]);
        for shared in waiting {
            assert_eq!(shared.await.unwrap(), [2]);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn two_versions_that_are_not_read_are_kept_for_a_while() {
        let (page, builds) = (Page::default(), Builds::default());
        let first = page.get(builds.build()).await.unwrap();
        let second = page.get(builds.build()).await.unwrap();
        assert_eq!(page.get(builds.build()).await.unwrap().bytes(), second.bytes());
        advance(MAX_AGE).await;
        let third = page.get(builds.build()).await.unwrap();
        assert_eq!((first.bytes(), second.bytes(), third.bytes()), (&[1][..], &[2][..], &[3][..]));
        assert_eq!(page.versions.lock().await.sent.len(), MAX_VERSIONS);
        drop((first, second, third));
        assert_eq!(page.get(builds.build()).await.unwrap().bytes(), [4]);
    }
}
