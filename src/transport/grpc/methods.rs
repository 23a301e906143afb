//! [`Methods`]: the methods that a server serves. The server itself knows connections and calls only.

use std::{pin::Pin, sync::Arc, task::Context};

use http::Request;
use tokio::sync::watch;

use super::{input::Input, request_body::RequestBody, response::Response};

/// The methods of a gRPC server, for the connections of one worker.
pub(crate) trait Methods: Send + Sync + 'static {
    /// Handles one call.
    ///
    /// `leaving` becomes true when the connection is to be closed. Streams, which would keep it open, then end.
    fn call(
        &self,
        request: Request<RequestBody>,
        context: &mut Context<'_>,
        leaving: &watch::Sender<bool>,
        input: &Arc<Input>,
    ) -> Answer;
}

/// The response to a call that has to wait.
pub(crate) type ResponseFuture = Pin<Box<dyn Future<Output = Response> + Send>>;

/// The answer to a call, or the future that returns it.
pub(crate) enum Answer {
    Now(Response),
    Later(ResponseFuture),
    /// The call is served by tonic, and can wait for long.
    ByTonic(ResponseFuture),
}
