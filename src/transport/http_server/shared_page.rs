//! [`SharedPage`]: a page with bytes that are shared by all callers that read it.

use std::sync::{Arc, OnceLock, Weak};

use axum::{
    body::Body,
    http::{HeaderValue, header::CONTENT_TYPE},
    response::Response,
};
use bytes::Bytes;
use parking_lot::{Mutex, MutexGuard};

use super::output::Output;

/// Number of readers from which on those that have finished are removed.
const MIN_READERS: usize = 64;

/// The bytes of a page, and the connections to which they are sent.
///
/// Its size follows from the configuration, not from its callers, so it needs no reservation. Its owner bounds how many
/// pages there are, and closes the connections of callers that do not read.
pub(in crate::transport) struct SharedPage {
    bytes: Vec<u8>,
    readers: Mutex<Readers>,
}

#[derive(Default)]
struct Readers {
    list: Vec<Weak<Reader>>,
    /// Length of the list at which those that have finished are removed.
    max: usize,
    is_closed: bool,
}

/// A response with the page that is not sent completely.
#[derive(Default)]
struct Reader {
    output: OnceLock<Weak<Output>>,
}

/// A page in the extensions of its response.
#[derive(Clone)]
pub(super) struct Sent {
    page: Weak<SharedPage>,
    reader: Weak<Reader>,
}

impl SharedPage {
    pub(in crate::transport) fn new(bytes: Vec<u8>) -> Arc<Self> {
        Arc::new(Self { bytes, readers: Mutex::default() })
    }

    /// Returns the bytes of the page.
    #[cfg(test)]
    pub(in crate::transport) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Returns a response with the page. Its memory is released when the response is sent.
    pub(in crate::transport) fn response(self: Arc<Self>, media_type: &'static str) -> Response {
        let reader = Arc::new(Reader::default());
        let sent = Sent { page: Arc::downgrade(&self), reader: Arc::downgrade(&reader) };
        self.readers().add(&reader);
        let bytes = Bytes::from_owner(PageBytes { page: self, _reader: reader });
        let mut response = Response::new(Body::from(bytes));
        response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(media_type));
        response.extensions_mut().insert(sent);
        response
    }

    /// Closes the connections to which the page is still sent. Returns their number.
    pub(in crate::transport) fn close_readers(&self) -> usize {
        let mut readers = self.readers();
        readers.is_closed = true;
        let list = std::mem::take(&mut readers.list);
        drop(readers);
        let mut closed = 0;
        for reader in list.iter().filter_map(Weak::upgrade) {
            if let Some(output) = reader.output.get().and_then(Weak::upgrade) {
                output.close_unread();
                closed += 1;
            }
        }
        closed
    }

    fn readers(&self) -> MutexGuard<'_, Readers> {
        self.readers.lock()
    }
}

impl Readers {
    fn add(&mut self, reader: &Arc<Reader>) {
        if self.list.len() >= self.max.max(MIN_READERS) {
            self.list.retain(|reader| reader.strong_count() > 0);
            self.max = 2 * self.list.len();
        }
        self.list.push(Arc::downgrade(reader));
    }
}

impl Sent {
    /// Records the connection to which the page is sent.
    pub(super) fn record(&self, output: &Arc<Output>) {
        let (Some(page), Some(reader)) = (self.page.upgrade(), self.reader.upgrade()) else {
            return;
        };
        // A response is sent on one connection.
        let _ = reader.output.set(Arc::downgrade(output));
        if page.readers().is_closed {
            output.close_unread();
        }
    }
}

struct PageBytes {
    page: Arc<SharedPage>,
    _reader: Arc<Reader>,
}

impl AsRef<[u8]> for PageBytes {
    fn as_ref(&self) -> &[u8] {
        &self.page.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::testing::{output, unread},
        *,
    };

    fn send(page: &Arc<SharedPage>, output: &Arc<Output>) -> Response {
        let response = Arc::clone(page).response("text/plain");
        response.extensions().get::<Sent>().unwrap().record(output);
        response
    }

    #[tokio::test]
    async fn only_connections_that_have_not_read_the_page_are_closed() {
        let page = SharedPage::new(vec![b'x'; 10]);
        let [honest, other] = [output(), output()];
        let read = axum::body::to_bytes(send(&page, &honest).into_body(), 10).await.unwrap();
        assert_eq!(read.len(), 10);
        drop(read);
        let held = send(&page, &other);
        assert_eq!(page.close_readers(), 1);
        assert_eq!((unread(&honest), unread(&other)), (0, 1));
        // A response that is sent later, too.
        let late = send(&page, &honest);
        assert_eq!(unread(&honest), 1);
        drop((held, late));
        assert_eq!(Arc::strong_count(&page), 1);
    }

    #[test]
    fn readers_that_have_finished_are_forgotten() {
        let page = SharedPage::new(Vec::new());
        let held = send(&page, &output());
        for _ in 0..MIN_READERS * 10 {
            drop(send(&page, &output()));
        }
        assert!(page.readers().list.len() <= MIN_READERS);
        drop(held);
    }
}
