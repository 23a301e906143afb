//! The API of the web console on the HTTP listener: the access to its data, and the data.

/// The role of callers.
mod access;
/// The stream of activity, rules, entities and simulations.
mod data;

use std::{
    io::{BufRead, BufReader},
    sync::mpsc::{Receiver, channel},
};

use serde_json::Value;

use crate::support::{DEADLINE, Server, server::agent};

/// Calls a method on the HTTP listener, and returns the status code and the response.
fn call(server: &Server, method: &str, body: &str, headers: &[(&str, &str)]) -> (u16, Value) {
    let mut request = agent().post(server.url(&format!("/v1/{method}")));
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let mut response = request.send(body.as_bytes()).unwrap();
    let text = response.body_mut().read_to_string().unwrap();
    (response.status().as_u16(), serde_json::from_str(&text).unwrap_or(Value::String(text)))
}

/// Decides a request about `user` in the domain `api`, and returns the status code.
fn ask(server: &Server, user: &str) -> u16 {
    let entries = serde_json::json!([{ "key": "user", "value": user }]);
    let request = serde_json::json!({ "domain": "api", "descriptors": [{ "entries": entries }] });
    agent().post(server.url("/json")).send(request.to_string().as_bytes()).unwrap().status().as_u16()
}

/// The updates of a stream of activity.
struct Updates(Receiver<Value>);

impl Updates {
    /// Starts to watch, with these headers.
    fn watch(server: &Server, request: &str, headers: &[(&str, &str)]) -> Self {
        // The stream stays open for the whole test; each update has a deadline of its own.
        let call = agent().post(server.url("/v1/WatchActivity"));
        let mut call = call.config().timeout_global(None).build();
        for (name, value) in headers {
            call = call.header(*name, *value);
        }
        let response = call.send(request.as_bytes()).unwrap();
        assert_eq!(response.headers()["content-type"], "text/event-stream");
        let (sender, receiver) = channel();
        let lines = BufReader::new(response.into_body().into_reader()).lines();
        std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                let Some(json) = line.strip_prefix("data: ") else { continue };
                if sender.send(serde_json::from_str(json).unwrap()).is_err() {
                    return;
                }
            }
        });
        Self(receiver)
    }

    fn next(&self) -> Value {
        self.0.recv_timeout(DEADLINE).unwrap()
    }

    /// Returns the first update that the condition accepts.
    fn find(&self, accepts: impl Fn(&Value) -> bool) -> Value {
        loop {
            let update = self.next();
            if accepts(&update) {
                return update;
            }
        }
    }
}

/// Returns a number of an update, which is a string or missing in proto3 JSON.
fn number(value: &Value) -> u64 {
    value.as_str().map_or_else(|| value.as_u64().unwrap_or_default(), |text| text.parse().unwrap())
}
