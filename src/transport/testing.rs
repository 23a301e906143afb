//! Tools of the tests of several modules: requests of browsers.

use axum::{body::Body, extract::Request};

/// Returns a call of the admin API with these headers.
pub(super) fn request(headers: &[(&str, &str)]) -> Request {
    let mut request = Request::builder().uri("/v1/Inspect");
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    request.body(Body::empty()).unwrap()
}
