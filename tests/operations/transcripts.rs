//! The transcripts of docs/guides/operations.md, typed as they stand: what they print is what they say.
//! `UPDATE_TRANSCRIPTS=1` writes what is printed now into the document.

use std::{fs, path::Path, process::Command};

use crate::support::{Operator, Server, operator::OPERATE, repository, wait_for};

/// The access log that the document speaks of: two hundred users in ten minutes, one of whom is quicker.
fn access_log() -> String {
    let mut text = String::new();
    for second in 0..600_u32 {
        for user in 0..200 {
            let times = if user == 7 { 10 } else { u32::from((second + user) % 2 == 0) };
            let line = format!(
                "{{\"start_time\": {}, \"x_user\": \"u{user}\", \"path\": \"/a?b\"}}\n",
                1_700_000_000 + second
            );
            text += &line.repeat(times as usize);
        }
    }
    text
}

/// The text of the block whose first line is this comment.
fn block<'d>(document: &'d str, comment: &str) -> &'d str {
    let start = document.find(comment).unwrap();
    let end = document[start..].find("```").unwrap();
    &document[start..start + end]
}

/// Whether the line is what the document has, where `…` is anything.
fn fits(line: &str, expected: &str) -> bool {
    let mut rest = line;
    let mut parts = expected.split('…');
    let Some(start) = parts.next().and_then(|first| rest.strip_prefix(first)) else {
        return false;
    };
    rest = start;
    let parts: Vec<_> = parts.collect();
    for (place, part) in parts.iter().enumerate() {
        if place + 1 == parts.len() {
            return rest.ends_with(part);
        }
        let Some(at) = rest.find(part) else {
            return false;
        };
        rest = &rest[at + part.len()..];
    }
    rest.is_empty()
}

/// What differs from run to run is told by its form.
fn with_gaps(line: &str) -> String {
    for start in ["  reset in ", "  retry after "] {
        if line.starts_with(start) {
            return format!("{start}…");
        }
    }
    if let Some((hits, _)) = line.split_once(" hits in ") {
        return format!("{hits} hits in … s");
    }
    let words: Vec<String> = line
        .split(' ')
        .map(|word| {
            let is_digest = word.len() >= 64 && word.chars().take(64).all(|letter| letter.is_ascii_hexdigit());
            if is_digest { format!("…{}", &word[64..]) } else { without_times(word) }
        })
        .collect();
    words.join(" ")
}

/// `2026-11-22T04:00:00Z` and so on.
fn without_times(word: &str) -> String {
    const FORM: &[u8] = b"0000-00-00T00:00:00Z";
    let is_time = |bytes: &[u8]| {
        let fits = |(byte, form): (&u8, &u8)| if *form == b'0' { byte.is_ascii_digit() } else { byte == form };
        bytes.len() == FORM.len() && bytes.iter().zip(FORM).all(fits)
    };
    match (0..word.len()).find(|at| word.as_bytes().get(*at..at + FORM.len()).is_some_and(is_time)) {
        Some(at) => format!("{}…{}", &word[..at], without_times(&word[at + FORM.len()..])),
        None => word.to_owned(),
    }
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
        .env("SLUICEGATE_TOKEN_FILE", "token")
        .output()
        .unwrap();
    assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
    // As whoever types it sees it.
    let printed = String::from_utf8(output.stdout).unwrap().replace(&operator.addr, "http://127.0.0.1:8082");
    printed.replace(&format!("{}/", folder.display()), "")
}

#[test]
fn the_transcripts_are_true() {
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
    let (mut written, mut wrong, mut asked) = (String::new(), Vec::new(), 0);
    let mut lines = document.lines().peekable();
    let mut inside = false;
    while let Some(line) = lines.next() {
        written += line;
        written.push('\n');
        inside = if line.starts_with("```") { line == "```console" } else { inside };
        let Some(command) = line.strip_prefix("$ ").filter(|_| inside) else {
            continue;
        };
        asked += command.matches("curl").count();
        if command.starts_with("sluicegate simulate --rules") {
            let recorded = || operator.server.metric("sluicegate_recorded_requests_total");
            wait_for("all to be recorded", || (recorded() >= asked as f64).then_some(()));
            // What waits is written within a second.
            wait_for("a file", || at("traffic").read_dir().ok()?.next().map(drop));
        }
        let printed = run(command, folder.path(), &operator);
        let mut expected = Vec::new();
        while let Some(next) = lines.next_if(|next| !next.starts_with("$ ") && !next.starts_with("```")) {
            expected.push(next);
        }
        let printed: Vec<&str> = printed.lines().collect();
        let same = printed.len() == expected.len()
            && printed.iter().zip(&expected).all(|(line, it)| fits(line.trim_end(), it));
        if !same {
            wrong.push(format!("{command}\nprints\n{}\nand not\n{}", printed.join("\n"), expected.join("\n")));
        }
        for line in &printed {
            written += with_gaps(line.trim_end()).trim_end();
            written.push('\n');
        }
    }
    if std::env::var_os("UPDATE_TRANSCRIPTS").is_some() {
        fs::write(&file, written).unwrap();
        return;
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
    assert!(fs::read_to_string(at("page.html")).unwrap().contains("<svg"));
}
