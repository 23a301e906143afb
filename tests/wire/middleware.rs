//! The middleware in Go that docs/guides/other-languages.md shows, in front of a handler.

use std::{
    fs,
    io::{BufRead, BufReader},
    path::PathBuf,
    process::{Command, Stdio},
};

use crate::support::{Server, repository, server::agent};

/// A program that prints its address, and serves `no orders` behind the middleware.
const MAIN: &str = r#"
package main

import (
	"fmt"
	"net"
	"net/http"
	"os"
)

func main() {
	orders := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { fmt.Fprintln(w, "no orders") })
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		panic(err)
	}
	fmt.Println(listener.Addr())
	panic(http.Serve(listener, RateLimit(os.Args[1], orders)))
}
"#;

/// Returns the Go that `tests/setup.sh` installed, or else the one that it found.
fn go() -> PathBuf {
    let installed = repository("target/test-tools/bin/go");
    if installed.exists() { installed } else { "go".into() }
}

/// Sends a request of this user. Returns the status and `Retry-After`.
fn get_orders(address: &str, user: &str) -> (u16, Option<String>) {
    let response = agent().get(format!("http://{address}/orders")).header("x-user", user).call().unwrap();
    let retry_after = response.headers().get("retry-after").map(|wait| wait.to_str().unwrap().to_owned());
    (response.status().as_u16(), retry_after)
}

#[test]
fn the_documented_middleware_in_go_denies_and_passes_while_the_service_is_down() {
    let page = fs::read_to_string(repository("docs/guides/other-languages.md")).unwrap();
    let (_, code) = page.split_once("```go\n").unwrap();
    let (code, _) = code.split_once("```").unwrap();
    // On a busy machine, 20 ms are too short for a test that expects a denial.
    let (code, timeout) = (code.replace("20 * time.Millisecond", "60 * time.Second"), "60 * time.Second");
    assert!(code.contains(timeout));
    let folder = tempfile::tempdir().unwrap();
    let files =
        [("go.mod", "module example\n\ngo 1.22\n"), ("middleware.go", code.as_str()), ("main.go", MAIN.trim_start())];
    for (name, text) in files {
        fs::write(folder.path().join(name), text).unwrap();
    }
    let program = folder.path().join("example");
    let mut build = Command::new(go());
    build.args(["build", "-buildvcs=false", "-o"]).arg(&program).arg(".").current_dir(folder.path());
    let output = build.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));

    let server = Server::builder().start();
    let mut child = Command::new(&program).arg(server.url("/json")).stdout(Stdio::piped()).spawn().unwrap();
    let mut address = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut address).unwrap();
    let statuses = [(); 4].map(|()| get_orders(address.trim(), "bob"));
    drop(server);
    let without_service = get_orders(address.trim(), "bob");
    child.kill().unwrap();
    child.wait().unwrap();

    assert_eq!(statuses.each_ref().map(|(status, _)| *status), [200, 200, 200, 429]);
    let retry_after: u64 = statuses[3].1.as_ref().unwrap().parse().unwrap();
    assert!((1..=60).contains(&retry_after), "{retry_after}");
    assert_eq!(without_service, (200, None));
}
