//! The parts of a release that can be tested without building one: Debian's unit and settings, licences, the SBOM, manual
//! pages, and the metadata of the crates.

use std::{
    collections::HashSet,
    fs,
    io::Write,
    process::{Command, Output, Stdio},
};

use serde_json::Value;

use crate::support::{Server, repository, request_for, server::command};

const UNIT: &str = "deploy/dist/debian/sluicegate.service";
const SETTINGS: &str = "/etc/sluicegate/sluicegate.toml";

fn read(path: &str) -> String {
    fs::read_to_string(repository(path)).unwrap()
}

/// Returns the standard output of a command that must succeed without warnings.
fn output_of(command: &mut Command) -> String {
    let Output { status, stdout, stderr } = command.output().unwrap();
    let error = String::from_utf8_lossy(&stderr);
    assert!(status.success() && error.is_empty(), "{command:?}: {status}, {error}");
    String::from_utf8(stdout).unwrap()
}

/// Runs the script that lists the dependencies. Cargo may print progress on standard error.
fn inventory(command: &str) -> String {
    let script = repository("deploy/dist/inventory.py");
    let output =
        Command::new("python3").arg(script).arg(command).env("SOURCE_DATE_EPOCH", "1000000000").output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn cargo_toml(path: &str) -> toml::Table {
    toml::from_str(&read(path)).unwrap()
}

/// Starts the service with the command line of the unit, and the settings and rules of the package on free ports.
#[tokio::test]
async fn the_unit_of_the_debian_package_starts_a_service_that_only_this_host_can_reach() {
    let unit = read(UNIT);
    let arguments = unit.lines().find_map(|line| line.strip_prefix("ExecStart=/usr/bin/sluicegate ")).unwrap();
    let settings = read("deploy/dist/debian/sluicegate.toml");
    let etc = tempfile::tempdir().unwrap();
    fs::create_dir(etc.path().join("rules")).unwrap();
    fs::copy(repository("deploy/examples/quickstart.yaml"), etc.path().join("rules/example.yaml")).unwrap();
    let local = settings.replace("/etc/sluicegate/", &format!("{}/", etc.path().display()));
    let local = local.replace("\"127.0.0.1:8081\"", "\"127.0.0.1:0\"").replace("\"127.0.0.1:8080\"", "\"127.0.0.1:0\"");
    let file = etc.path().join("sluicegate.toml");
    fs::write(&file, local).unwrap();
    let mut command = command();
    command.args(
        arguments.split(' ').map(|argument| if argument == SETTINGS { file.to_str().unwrap() } else { argument }),
    );
    let server = Server::from_command(command).start();
    assert!(server.grpc.ip().is_loopback() && server.http.ip().is_loopback(), "{settings}");
    let verdict = server.client().await.check(request_for("example", &[("user", "bob")])).await.unwrap();
    assert_eq!(verdict.remaining(), Some(2));
    assert!(server.get("/rlconfig").contains("search"), "the rules of the package are served");
}

#[test]
fn the_unit_is_valid_and_grants_no_privileges() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("sluicegate.service");
    fs::write(&file, read(UNIT).replace("/usr/bin/sluicegate", env!("CARGO_BIN_EXE_sluicegate"))).unwrap();
    output_of(Command::new("systemd-analyze").args(["verify", "--man=no"]).arg(&file));
    // The exposure is a sum over all ways to reach the system, from 0 to 10; 10 times that is compared.
    output_of(
        Command::new("systemd-analyze").args(["security", "--offline=yes", "--no-pager", "--threshold=15"]).arg(&file),
    );
}

/// `make dist` runs the script with the programs of all architectures.
#[test]
fn the_check_of_a_release_accepts_only_a_program_that_serves() {
    let check = |program: &str| Command::new(repository("deploy/dist/check.sh")).arg(program).output().unwrap();
    let service = check(env!("CARGO_BIN_EXE_sluicegate"));
    assert!(service.status.success(), "{}", String::from_utf8_lossy(&service.stderr));
    let other = check("/bin/true");
    assert!(!other.status.success());
    assert!(String::from_utf8_lossy(&other.stderr).contains("the service ended at its start"), "{other:?}");
}

#[test]
fn every_dependency_has_a_licence_text() {
    let licences = inventory("licences");
    let sbom: Value = serde_json::from_str(&inventory("sbom")).unwrap();
    let lines: HashSet<&str> = licences.lines().collect();
    let components = sbom["components"].as_array().unwrap();
    assert!(components.len() > 200);
    for component in components {
        let line = format!("{} {}", component["name"].as_str().unwrap(), component["version"].as_str().unwrap());
        assert!(lines.contains(&*line), "{line}");
    }
    // Code from elsewhere inside crates, and a crate without a licence file.
    for text in ["Microsoft Corporation, Daan Leijen", "the fiat-crypto authors", "opentelemetry_sdk 0"] {
        assert!(licences.contains(text), "{text}");
    }
}

#[test]
fn the_sbom_is_complete_and_names_no_folder() {
    let text = inventory("sbom");
    assert_eq!(text, inventory("sbom"), "the same input gives the same bytes");
    assert!(!text.contains(env!("CARGO_MANIFEST_DIR")) && !text.contains("file://"), "{text}");
    let sbom: Value = serde_json::from_str(&text).unwrap();
    assert_eq!((&sbom["bomFormat"], &sbom["specVersion"]), (&"CycloneDX".into(), &"1.6".into()));
    assert_eq!(sbom["metadata"]["timestamp"], "2001-09-09T01:46:40Z");
    assert_eq!(sbom["metadata"]["component"]["version"], env!("CARGO_PKG_VERSION"));
    let components = sbom["components"].as_array().unwrap();
    let mut references: HashSet<&str> = components.iter().map(|each| each["bom-ref"].as_str().unwrap()).collect();
    assert_eq!(references.len(), components.len(), "references are unique");
    for component in components {
        let from_registry = component["purl"].as_str().unwrap().starts_with("pkg:cargo/")
            && !component["name"].as_str().unwrap().starts_with("sluicegate-");
        assert!(!from_registry || component["hashes"][0]["content"].as_str().unwrap().len() == 64, "{component}");
    }
    let scope = |name: &str| &components.iter().find(|each| each["name"] == name).unwrap()["scope"];
    assert_eq!(
        (scope("tokio"), scope("tokio-macros"), scope("cc")),
        (&"required".into(), &"excluded".into(), &"excluded".into())
    );
    assert!(
        components.iter().all(|each| each["name"] != "proptest"),
        "dependencies of tests are not part of a release"
    );
    references.insert(sbom["metadata"]["component"]["bom-ref"].as_str().unwrap());
    for entry in sbom["dependencies"].as_array().unwrap() {
        let targets = entry["dependsOn"].as_array().unwrap().iter().chain([&entry["ref"]]);
        for target in targets {
            assert!(references.contains(target.as_str().unwrap()), "{target}");
        }
    }
}

#[test]
fn the_manual_pages_render_without_warnings() {
    let help = output_of(command().arg("--help"));
    let commands = help.lines().skip_while(|line| *line != "Commands:").skip(1).take_while(|line| !line.is_empty());
    let commands: Vec<&str> =
        commands.filter_map(|line| line.split_whitespace().next()).filter(|name| *name != "help").collect();
    assert!(commands.len() >= 10, "{help}");
    for name in [""].iter().chain(&commands) {
        let page = output_of(command().arg("man").args((!name.is_empty()).then_some(name)));
        let title = if name.is_empty() { "sluicegate".to_owned() } else { format!("sluicegate-{name}") };
        let version = env!("CARGO_PKG_VERSION");
        assert!(page.contains(&format!(".TH {title} 1 \"\" \"sluicegate {version}\" \"User Commands\"")), "{page}");
        let mut man = Command::new("man");
        man.args(["--warnings", "--local-file", "-"]).env("LC_ALL", "C.UTF-8").env("MANPAGER", "cat");
        let mut man = man.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        man.stdin.take().unwrap().write_all(page.as_bytes()).unwrap();
        let output = man.wait_with_output().unwrap();
        let warnings = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && warnings.is_empty() && output.stdout.len() > 200, "{title}: {warnings}");
    }
}

#[test]
fn the_changelog_and_the_chart_have_the_version_of_the_service() {
    let version = env!("CARGO_PKG_VERSION");
    let changelog = read("CHANGELOG.md");
    let newest = changelog.lines().filter_map(|line| line.strip_prefix("## ")).find(|title| *title != "Unreleased");
    assert_eq!(newest.unwrap().split(' ').next(), Some(version));
    assert!(read("deploy/helm/sluicegate/Chart.yaml").contains(&format!("\nappVersion: {version}\n")));
}

/// The registry rejects or warns about crates without these, and a crate without its licence may not be passed on.
#[test]
fn published_crates_are_complete_and_the_service_is_not_published() {
    let workspace = cargo_toml("Cargo.toml");
    assert_eq!(workspace["package"]["publish"]["workspace"].as_bool(), Some(true));
    assert_eq!(workspace["workspace"]["package"]["publish"].as_bool(), Some(false));
    let published =
        ["proto", "client", "crates/cache", "crates/deadline", "crates/overload", "crates/placement", "crates/wire"];
    for folder in published {
        let package = &cargo_toml(&format!("{folder}/Cargo.toml"))["package"];
        assert_eq!(package["publish"].as_bool(), Some(true), "{folder}");
        for key in ["description", "categories", "keywords", "readme"] {
            assert!(package.get(key).is_some(), "{folder}: {key}");
        }
        assert!(!read(&format!("{folder}/{}", package["readme"].as_str().unwrap())).is_empty());
        assert_eq!(read(&format!("{folder}/LICENSE")), read("LICENSE"), "{folder}");
    }
}

/// A path that does not exist would only be noticed when a release is built.
#[test]
fn the_debian_package_names_existing_files() {
    let manifest = cargo_toml("Cargo.toml");
    let package = &manifest["package"]["metadata"]["deb"];
    let assets = package["assets"].as_array().unwrap();
    let built = ["target/release/sluicegate", "target/dist-build/"];
    let source = |asset: &toml::Value| asset[0].as_str().unwrap().to_owned();
    for path in assets.iter().map(source).filter(|path| !built.iter().any(|prefix| path.starts_with(prefix))) {
        assert!(repository(&path).exists(), "{path}");
    }
    // cargo-deb makes every file in /etc a conffile, which an upgrade does not overwrite.
    assert!(
        assets
            .iter()
            .any(|asset| source(asset).ends_with("sluicegate.toml") && asset[1].as_str() == Some("etc/sluicegate/"))
    );
}
