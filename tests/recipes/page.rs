//! [`run`]: starts the programs of a page of the book, runs its commands, and compares their output with the page.
//!
//! The first line of a code block names its purpose:
//!
//! - `# rules/….yaml`: a rule file of the service.
//! - `# routes for the domain NAME`: the routes of `deploy/envoy/envoy.yaml`, whose filters have this domain.
//! - `# functions`: functions of the shell for the commands.
//! - `# upstream.py`: the upstream of Envoy, which is started with its port. Without it, a plain one is used.
//!
//! Blocks of the language `console` are transcripts. Blocks of the language `rust` must be part of a source file that
//! the build compiles.

use std::{
    fs,
    net::{SocketAddr, TcpListener, TcpStream},
    path::Path,
    process::{Child, Command, Stdio},
    time::Instant,
};

use crate::{
    support::{
        DEADLINE, Operator, Server,
        envoy::Envoy,
        operator::OPERATE,
        repository, rules, rust_sources,
        transcripts::{is_documented, with_placeholders},
        wait_for,
    },
    wire::envoy::upstream,
};

/// Commands that change nothing. They are repeated until their output is the documented one, because Envoy writes its
/// log, and the service reloads its rules, a moment later.
const READ_ONLY: [&str; 5] =
    ["tail ", "sluicegate ctl top", "sluicegate ctl inspect", "curl -s localhost:8080/", "grep "];

/// A code block of a page.
struct Block<'p> {
    language: &'p str,
    /// The comment in the first line, without its sign.
    title: &'p str,
    text: &'p str,
}

/// Returns the code blocks of a page.
fn blocks(page: &str) -> Vec<Block<'_>> {
    let mut blocks = Vec::new();
    let mut rest = page;
    while let Some(start) = rest.find("\n```") {
        rest = &rest[start + 4..];
        let (language, after) = rest.split_once('\n').unwrap();
        let end = after.find("\n```").unwrap();
        let text = &after[..=end];
        let title = text.lines().next().unwrap().strip_prefix("# ").unwrap_or_default();
        blocks.push(Block { language, title, text });
        rest = &after[end + 4..];
    }
    blocks
}

/// Creates a temporary folder with the rule files of a page.
pub(crate) fn rule_files(path: &str) -> tempfile::TempDir {
    let page = fs::read_to_string(repository(path)).unwrap();
    let blocks = blocks(&page);
    let files = blocks.iter().filter_map(|block| Some((block.title.strip_prefix("rules/")?, block.text)));
    rules(&files.collect::<Vec<_>>())
}

/// The programs that a page needs; all of them end when this is dropped.
struct Setup {
    folder: tempfile::TempDir,
    functions: String,
    operator: Operator,
    envoy: Option<Envoy>,
    _upstream: Option<Upstream>,
}

/// A running upstream that a page defines; killed when dropped.
struct Upstream(Child);

impl Drop for Upstream {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Upstream {
    /// Starts the program on a free port, and waits until it accepts connections.
    fn start(program: &Path) -> (Self, SocketAddr) {
        let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let mut command = Command::new("python3");
        command.arg(program).arg(address.port().to_string()).stderr(Stdio::null());
        let upstream = Self(command.spawn().unwrap());
        wait_for("the upstream to listen", || TcpStream::connect(address).ok());
        (upstream, address)
    }
}

impl Setup {
    fn start(blocks: &[Block<'_>]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::create_dir(at("rules")).unwrap();
        fs::write(at("token"), OPERATE).unwrap();
        for block in blocks.iter().filter(|block| block.title.starts_with("rules/")) {
            fs::write(at(block.title), block.text).unwrap();
        }
        let builder = Server::builder().rules(&at("rules")).store("memory");
        let builder = builder.set("response.headers", "true").set("response.dynamic_metadata", "true");
        let operator = Operator::with(builder);
        let routes = blocks.iter().find(|block| block.title.starts_with("routes for the domain "));
        let program = blocks.iter().find(|block| block.title == "upstream.py");
        let mut own_upstream = None;
        let mut envoy = None;
        if let Some(routes) = routes {
            let address = match program {
                Some(program) => {
                    fs::write(at("upstream.py"), program.text).unwrap();
                    let (started, address) = Upstream::start(&at("upstream.py"));
                    own_upstream = Some(started);
                    address
                }
                None => upstream().0,
            };
            let started = start_envoy(routes, operator.server.grpc, address, &[]);
            std::os::unix::fs::symlink(started.access_log(), at("access.log")).unwrap();
            envoy = Some(started);
        }
        let functions = blocks.iter().filter(|block| block.title == "functions").map(|block| block.text).collect();
        Self { folder, functions, operator, envoy, _upstream: own_upstream }
    }

    /// Runs a command with the addresses of this setup, and returns its output with those of the page.
    fn run(&self, command: &str) -> String {
        let server = &self.operator.server;
        let mut line = format!("{}{command}", self.functions)
            .replace("localhost:8080", &server.http.to_string())
            .replace("localhost:8081", &server.grpc.to_string())
            .replace("127.0.0.1:8082", self.operator.addr.trim_start_matches("http://"));
        if let Some(envoy) = &self.envoy {
            line = line.replace("localhost:10000", envoy.address());
        }
        let bin = Path::new(env!("CARGO_BIN_EXE_sluicegate")).parent().unwrap().display().to_string();
        let output = Command::new("sh")
            .args(["-c", &format!("{{ {line}\n}} 2>&1")])
            .current_dir(self.folder.path())
            .env("PATH", format!("{bin}:{}", std::env::var("PATH").unwrap()))
            .env("SLUICEGATE_ADMIN", &self.operator.addr)
            .env("SLUICEGATE_GRPC", format!("http://{}", self.operator.server.grpc))
            .env("SLUICEGATE_TOKEN_FILE", "token")
            .output()
            .unwrap();
        let printed = String::from_utf8(output.stdout).unwrap();
        let printed = printed.replace(&self.operator.addr, "http://127.0.0.1:8082");
        printed.replace(&format!("{}/", self.folder.path().display()), "")
    }

    /// Runs a command of a transcript. One that changes nothing is repeated until it prints the expected lines.
    fn transcribe(&self, command: &str, expected: &[&str]) -> String {
        let deadline = Instant::now() + DEADLINE / 6;
        loop {
            let printed = self.run(command);
            let is_final = !READ_ONLY.iter().any(|start| command.starts_with(start)) || Instant::now() > deadline;
            if is_final || is_documented(&printed, expected) {
                return printed;
            }
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
    }
}

/// Returns the code block of a page that begins with this text.
pub(crate) fn code(path: &str, start: &str) -> String {
    let page = fs::read_to_string(repository(path)).unwrap();
    let found = blocks(&page).into_iter().find(|block| block.text.starts_with(start));
    found.expect("the page has this block").text.to_owned()
}

/// Starts Envoy with the routes of a page, in front of a plain upstream. Further texts of its file are replaced by
/// others.
pub(crate) fn start_envoy_of(path: &str, service: SocketAddr, changes: &[(&str, &str)]) -> Envoy {
    let page = fs::read_to_string(repository(path)).unwrap();
    let blocks = blocks(&page);
    let routes = blocks.iter().find(|block| block.title.starts_with("routes for the domain ")).unwrap();
    start_envoy(routes, service, upstream().0, changes)
}

/// Starts Envoy with `deploy/envoy/envoy.yaml`, in which these routes replace its own, and texts are replaced by others.
fn start_envoy(routes: &Block<'_>, service: SocketAddr, upstream: SocketAddr, changes: &[(&str, &str)]) -> Envoy {
    const FILE: &str = "deploy/envoy/envoy.yaml";
    let domain = routes.title.trim_start_matches("routes for the domain ");
    let config = fs::read_to_string(repository(FILE)).unwrap();
    let (_, after) = config.split_once("              routes:\n").unwrap();
    let (present, _) = after.split_once("          http_filters:\n").unwrap();
    let indented: Vec<String> = routes.text.lines().map(|line| format!("              {line}\n")).collect();
    let (routes, domain) = (indented.concat(), format!("domain: {domain}\n"));
    let mut all = vec![(present, routes.as_str()), ("domain: envoy\n", &domain), ("timeout: 0.1s", "timeout: 5s")];
    all.extend(changes);
    Envoy::start_changed(FILE, service, upstream, &all)
}

/// Removes the indentation of all lines.
fn without_indentation(code: &str) -> String {
    code.lines().map(str::trim).collect::<Vec<_>>().join("\n")
}

/// Asserts that the code is part of a file that the build compiles, without regard to indentation.
fn assert_compiled(code: &str) {
    let code = without_indentation(code);
    for folder in ["tests/recipes", "client/examples"] {
        for (_, source) in rust_sources(folder) {
            if without_indentation(&source).contains(&code) {
                return;
            }
        }
    }
    panic!("no source file contains\n{code}");
}

/// Runs the commands of a page and compares their output. `UPDATE_TRANSCRIPTS=1` writes the present output to the page.
pub(crate) fn run(path: &str) {
    let file = repository(path);
    let page = fs::read_to_string(&file).unwrap();
    let blocks = blocks(&page);
    for block in blocks.iter().filter(|block| block.language == "rust") {
        assert_compiled(block.text);
    }
    let setup = Setup::start(&blocks);
    let mut updated = String::new();
    let mut mismatches = Vec::new();
    let mut commands = 0;
    let mut lines = page.lines().peekable();
    let mut in_transcript = false;
    while let Some(line) = lines.next() {
        updated += line;
        updated.push('\n');
        if line.starts_with("```") {
            in_transcript = line == "```console";
        }
        let Some(first) = line.strip_prefix("$ ").filter(|_| in_transcript) else {
            continue;
        };
        let mut command = first.to_owned();
        while command.ends_with('\\') {
            let next = lines.next().unwrap();
            command = format!("{command}\n{next}");
            updated += next;
            updated.push('\n');
        }
        commands += 1;
        let mut expected = Vec::new();
        while let Some(next) = lines.next_if(|next| !next.starts_with("$ ") && !next.starts_with("```")) {
            expected.push(next);
        }
        let printed = setup.transcribe(&command, &expected);
        if is_documented(&printed, &expected) {
            for line in expected {
                updated += &format!("{line}\n");
            }
            continue;
        }
        mismatches.push(format!("{command}\nprints\n{printed}instead of\n{}", expected.join("\n")));
        for line in printed.lines() {
            updated += &format!("{}\n", with_placeholders(line.trim_end()).trim_end());
        }
    }
    assert!(commands > 0, "{path} has no transcript");
    if std::env::var_os("UPDATE_TRANSCRIPTS").is_some() {
        fs::write(&file, updated).unwrap();
        return;
    }
    assert!(mismatches.is_empty(), "{}", mismatches.join("\n\n"));
}
