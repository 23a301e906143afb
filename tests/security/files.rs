//! Files that the service follows while it runs, replaced by something else.

use std::{fs, path::Path, process::Command};

use crate::support::{Operator, Server, operator::OPERATE, rules, server::get, wait_for};

const RULES: &str = "domain: api\ndescriptors:\n- key: user\n  rate_limit: { unit: year, requests_per_unit: 2 }\n";

/// Puts a pipe without a writer in place of a file.
fn replace_by_pipe(path: &Path) {
    let pipe = path.with_extension("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    fs::rename(pipe, path).unwrap();
}

/// Reading a pipe would wait for a writer for ever.
#[test]
fn a_pipe_in_place_of_a_file_stops_nothing() {
    let folder = rules(&[("api.yaml", RULES)]);
    let files = tempfile::tempdir().unwrap();
    let switches = files.path().join("switches");
    fs::write(&switches, "").unwrap();
    let builder = Server::builder().rules(folder.path()).set("overrides.switch_file", switches.to_str().unwrap());
    let operator = Operator::with(builder);
    let server = &operator.server;
    replace_by_pipe(&switches);
    replace_by_pipe(operator.token_file());
    for file in ["switches", "token file"] {
        wait_for("the error to be logged", || {
            let log = server.log();
            let mut errors = log.lines().filter(|line| line.contains("not a regular file"));
            errors.any(|line| line.contains(file)).then_some(())
        });
    }
    assert_eq!(get(&server.url("/healthcheck")), (200, "OK".into()));
    // The previous tokens stay valid, and files that return are read.
    assert_eq!(operator.call(OPERATE, "GetHealth", "{}").0, 200);
    fs::remove_file(&switches).unwrap();
    fs::write(&switches, "off everything # drill\n").unwrap();
    wait_for("the switch to apply", || {
        operator.call(OPERATE, "GetHealth", "{}").1.to_string().contains("drill").then_some(())
    });
    fs::remove_file(operator.token_file()).unwrap();
    operator.replace_tokens("read 0123456789abcdef eve\n");
}
