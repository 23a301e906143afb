//! The documentation: links and paths lead somewhere, the book contains every page and builds, and paragraphs stay short.

use std::{
    collections::HashSet,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use crate::support::{repository, rust_sources, tool};

/// Longest paragraph in lines of 100 columns.
const MAX_PARAGRAPH_LINES: usize = 6;
const COLUMNS: usize = 100;

/// Returns all Markdown files of the repository's documentation.
fn pages() -> Vec<PathBuf> {
    fn collect(folder: &Path, pages: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                collect(&path, pages);
            } else if path.extension().is_some_and(|extension| extension == "md") {
                pages.push(path);
            }
        }
    }
    let mut pages: Vec<PathBuf> =
        ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "client/README.md"].map(repository).into();
    collect(&repository("docs"), &mut pages);
    pages
}

/// Returns the lines that are not part of a code block.
fn prose(text: &str) -> impl Iterator<Item = &str> {
    let mut in_code = false;
    text.lines().filter(move |line| {
        let is_fence = line.trim_start().starts_with("```");
        in_code ^= is_fence;
        !in_code && !is_fence
    })
}

/// Returns the anchors of a page's headings, formed as code hosts and mdBook form them.
fn anchors(text: &str) -> HashSet<String> {
    let slug = |heading: &str| {
        let lower = heading.trim().to_lowercase();
        let kept = lower.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
        kept.map(|c| if c == ' ' { '-' } else { c }).collect()
    };
    prose(text).filter(|line| line.starts_with('#')).map(|line| slug(line.trim_start_matches('#'))).collect()
}

/// Returns the targets of inline links, `[text](target)`.
fn links(text: &str) -> Vec<String> {
    let mut links = Vec::new();
    for line in prose(text) {
        let mut rest = line;
        while let Some(start) = rest.find("](") {
            rest = &rest[start + 2..];
            let Some(end) = rest.find(')') else { break };
            links.push(rest[..end].split(' ').next().unwrap_or_default().to_owned());
            rest = &rest[end..];
        }
    }
    links
}

#[test]
fn every_relative_link_leads_to_a_file_and_a_heading() {
    let mut broken = Vec::new();
    let mut checked = 0;
    for page in pages() {
        let text = fs::read_to_string(&page).unwrap();
        for link in links(&text) {
            if link.contains("://") || link.starts_with("mailto:") {
                continue;
            }
            checked += 1;
            let (path, anchor) = link.split_once('#').unwrap_or((&link, ""));
            let target = if path.is_empty() { page.clone() } else { page.parent().unwrap().join(path) };
            let is_there = target.exists()
                && (anchor.is_empty()
                    || target.extension().is_none_or(|extension| extension != "md")
                    || anchors(&fs::read_to_string(&target).unwrap()).contains(anchor));
            if !is_there {
                broken.push(format!("{}: {link}", page.display()));
            }
        }
    }
    assert!(checked > 100, "only {checked} links were found");
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}

/// Returns the texts in code style that can be paths: at least two names of files and folders, separated by slashes.
fn paths(text: &str) -> Vec<String> {
    let mut paths = Vec::new();
    for line in prose(text) {
        for code in line.split('`').skip(1).step_by(2) {
            let is_path = code.contains('/') && code.chars().all(|c| c.is_ascii_alphanumeric() || "_-./".contains(c));
            if is_path {
                paths.push(code.trim_end_matches('/').to_owned());
            }
        }
    }
    paths
}

#[test]
fn every_path_to_a_source_leads_to_a_file_or_a_folder() {
    let mut missing = Vec::new();
    let mut checked = 0;
    for page in pages().into_iter().filter(|page| page.starts_with(repository("docs/design"))) {
        let text = fs::read_to_string(&page).unwrap();
        for path in paths(&text) {
            let (first, rest) = path.split_once('/').unwrap_or((&path, ""));
            let source = repository("src").join(first);
            let package = repository("crates").join(first).join("src");
            if first.is_empty() || !(source.exists() || package.exists()) {
                continue;
            }
            checked += 1;
            if !source.join(rest).exists() && !package.join(rest).exists() && !repository(&path).exists() {
                missing.push(format!("{}: {path}", page.display()));
            }
        }
    }
    assert!(checked > 100, "only {checked} paths were found");
    assert!(missing.is_empty(), "{}", missing.join("\n"));
}

/// Returns whether a name such as `engine::overrides::Target` exists in a crate or a module. A name that begins with a type
/// can be anywhere.
fn name_exists(name: &str) -> bool {
    let parts: Vec<&str> = name.split("::").collect();
    if parts[0].starts_with(char::is_uppercase) {
        return has_words("crates", &parts) || has_words("client/src", &parts);
    }
    let first = parts[0];
    let roots =
        [format!("crates/{first}/src"), format!("{first}/src"), format!("src/{first}"), format!("src/{first}.rs")];
    roots.into_iter().any(|root| repository(&root).exists() && is_in(root, &parts[1..]))
}

/// Returns whether each part is a folder or a file inside the one before, and the last ones are words in its sources.
fn is_in(mut place: String, parts: &[&str]) -> bool {
    for (index, part) in parts.iter().enumerate() {
        let [folder, file] = [format!("{place}/{part}"), format!("{place}/{part}.rs")];
        if repository(&folder).exists() {
            place = folder;
        } else if repository(&file).exists() {
            place = file;
        } else {
            return has_words(&place, &parts[index..]);
        }
    }
    true
}

/// Returns whether the sources in a file or folder have all of these words.
fn has_words(place: &str, words: &[&str]) -> bool {
    let sources = if place.ends_with(".rs") {
        vec![fs::read_to_string(repository(place)).unwrap()]
    } else {
        rust_sources(place).into_iter().map(|(_, text)| text).collect()
    };
    let mut known = HashSet::new();
    for text in &sources {
        known.extend(text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_')));
    }
    words.iter().all(|word| known.contains(word))
}

#[test]
fn every_name_in_the_glossary_exists() {
    let glossary = fs::read_to_string(repository("docs/glossary.md")).unwrap();
    let mut checked = 0;
    let mut missing = Vec::new();
    for row in glossary.lines().filter(|line| line.starts_with("| **")) {
        let (_, code) = row.trim_end_matches(['|', ' ']).rsplit_once(" | ").unwrap();
        for name in code.split('`').skip(1).step_by(2).filter(|name| name.contains("::")) {
            checked += 1;
            if !name_exists(name) {
                missing.push(name);
            }
        }
    }
    assert!(checked > 80, "only {checked} names were found");
    assert!(missing.is_empty(), "{}", missing.join("\n"));
}

#[test]
fn the_summary_lists_every_page_of_the_book() {
    let docs = repository("docs");
    let summary = fs::read_to_string(docs.join("SUMMARY.md")).unwrap();
    let listed: HashSet<PathBuf> = links(&summary).into_iter().map(|link| docs.join(link)).collect();
    let missing: Vec<_> = pages()
        .into_iter()
        .filter(|page| page.starts_with(&docs) && !page.ends_with("SUMMARY.md") && !listed.contains(page))
        .collect();
    assert!(missing.is_empty(), "not in SUMMARY.md: {missing:?}");
}

#[test]
fn the_book_builds_without_warnings() {
    let folder = tempfile::tempdir().unwrap();
    let output =
        Command::new(tool("mdbook")).arg("build").arg(repository("")).arg("-d").arg(folder.path()).output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && !text.contains("WARN") && !text.contains("ERROR"), "{text}");
    assert!(folder.path().join("glossary.html").exists(), "{text}");
}

#[test]
fn paragraphs_and_the_readme_stay_short() {
    let readme = fs::read_to_string(repository("README.md")).unwrap().lines().count();
    assert!(readme <= 120, "README.md has {readme} lines");
    let mut long = Vec::new();
    for page in pages().into_iter().filter(|page| !page.ends_with("CHANGELOG.md")) {
        let text = fs::read_to_string(&page).unwrap();
        let mut paragraph = String::new();
        for line in prose(&text).chain([""]) {
            let is_text = !line.trim().is_empty() && !line.trim_start().starts_with(['|', '#', '-', '*', '>', '!']);
            let starts_item =
                line.trim_start().starts_with(|first: char| first.is_ascii_digit()) && line.contains(". ");
            if is_text && !starts_item {
                paragraph.push_str(line);
                continue;
            }
            if paragraph.chars().count() > MAX_PARAGRAPH_LINES * COLUMNS {
                long.push(format!("{}: {}…", page.display(), paragraph.chars().take(60).collect::<String>()));
            }
            paragraph.clear();
            if starts_item {
                paragraph.push_str(line);
            }
        }
    }
    assert!(long.is_empty(), "{}", long.join("\n"));
}
