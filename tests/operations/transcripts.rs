//! Runs the commands in the transcripts of docs/guides/operations.md and compares their output with the document.
//! `UPDATE_TRANSCRIPTS=1` writes the present output to the document.

use std::{fs, path::Path, process::Command};

use sluicegate::traffic::Reader;

use crate::support::{
    Operator, Server,
    operator::OPERATE,
    repository,
    transcripts::{is_documented, with_placeholders},
    wait_for,
};

/// Returns the access log of the document: 200 users in ten minutes, one of them with more requests.
fn access_log() -> String {
    let mut text = String::new();
    for second in 0..600_u32 {
        for user in 0..200 {
            let requests = if user == 7 { 10 } else { u32::from((second + user) % 2 == 0) };
            let line = format!(
                "{{\"start_time\": {}, \"x_user\": \"u{user}\", \"path\": \"/a?b\"}}\n",
                1_700_000_000 + second
            );
            text += &line.repeat(requests as usize);
        }
    }
    text
}

/// Returns the code block that begins with this comment.
fn block<'d>(document: &'d str, comment: &str) -> &'d str {
    let start = document.find(comment).unwrap();
    let end = document[start..].find("```").unwrap();
    &document[start..start + end]
}

fn run(line: &str, folder: &Path, operator: &Operator) -> String {
    let line = line.replace("localhost:8080", &operator.server.http.to_string());
    let line = line.replace("127.0.0.1:8082", operator.addr.trim_start_matches("http://"));
    let bin = Path::new(env!("CARGO_BIN_EXE_sluicegate")).parent().unwrap().display().to_string();
    let output = Command::new("sh")
        .args(["-c", &line])
        .current_dir(folder)
        .env("PATH", format!("{bin}:{}", std::env::var("PATH").unwrap()))
        .env("SLUICEGATE_ADMIN", &operator.addr)
        .env("SLUICEGATE_GRPC", format!("http://{}", operator.server.grpc))
        .env("SLUICEGATE_TOKEN_FILE", "token")
        .output()
        .unwrap();
    assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
    // The document has the default address, and no temporary folder.
    let printed = String::from_utf8(output.stdout).unwrap().replace(&operator.addr, "http://127.0.0.1:8082");
    printed.replace(&format!("{}/", folder.display()), "")
}

/// Returns the number of recorded requests in a directory.
fn in_files(directory: &Path) -> usize {
    let Ok(mut reader) = Reader::new(&[directory.to_owned()]) else {
        return 0;
    };
    let mut message = Vec::new();
    std::iter::from_fn(|| reader.next(&mut message).ok().filter(|is_message| *is_message)).count()
}

#[test]
fn the_commands_print_the_documented_output() {
    let file = repository("docs/guides/operations.md");
    let document = fs::read_to_string(&file).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    fs::create_dir(at("rules")).unwrap();
    fs::write(at("rules/shop.yaml"), block(&document, "# rules/shop.yaml")).unwrap();
    fs::write(at("mapping.yaml"), block(&document, "# mapping.yaml")).unwrap();
    fs::write(at("access.log"), access_log()).unwrap();
    fs::write(at("token"), OPERATE).unwrap();
    let builder = Server::builder().rules(&at("rules")).store("memory").set("record.share", "1");
    let operator = Operator::with(builder.set("record.dir", at("traffic").to_str().unwrap()));
    let (mut updated, mut mismatches, mut requests) = (String::new(), Vec::new(), 0);
    let mut lines = document.lines().peekable();
    let mut in_transcript = false;
    while let Some(line) = lines.next() {
        updated += line;
        updated.push('\n');
        in_transcript = if line.starts_with("```") { line == "```console" } else { in_transcript };
        let Some(command) = line.strip_prefix("$ ").filter(|_| in_transcript) else {
            continue;
        };
        requests += command.matches("curl").count();
        if command.starts_with("sluicegate simulate --rules") {
            let recorded = || operator.server.metric("sluicegate_recorded_requests_total");
            wait_for("all requests to be recorded", || (recorded() >= requests as f64).then_some(()));
            // The metric counts requests when they are queued, and the file follows within two seconds.
            wait_for("all requests in files", || (in_files(&at("traffic")) as f64 == recorded()).then_some(()));
        }
        let printed = run(command, folder.path(), &operator);
        let mut expected = Vec::new();
        while let Some(next) = lines.next_if(|next| !next.starts_with("$ ") && !next.starts_with("```")) {
            expected.push(next);
        }
        let is_same = is_documented(&printed, &expected);
        let printed: Vec<&str> = printed.lines().collect();
        if !is_same {
            mismatches.push(format!("{command}\nprints\n{}\ninstead of\n{}", printed.join("\n"), expected.join("\n")));
        }
        for line in &printed {
            updated += with_placeholders(line.trim_end()).trim_end();
            updated.push('\n');
        }
    }
    if std::env::var_os("UPDATE_TRANSCRIPTS").is_some() {
        fs::write(&file, updated).unwrap();
        return;
    }
    assert!(mismatches.is_empty(), "{}", mismatches.join("\n\n"));
    assert!(fs::read_to_string(at("page.html")).unwrap().contains("<svg"));
}
