//! No circle between the modules of a folder: each uses only those below it, so that it can be read without them.

use std::collections::{BTreeMap, BTreeSet};

use syn::visit::{self, Visit};

use super::support::rust_sources;

/// Circles that may stay, each with the reason: the folder, and the modules that a circle may contain.
const PERMITTED: &[(&str, &[&str], &str)] = &[
    (
        "crates/algorithm/src",
        ALGORITHMS,
        "the enums of all algorithms, and the parts of them that each algorithm needs",
    ),
    ("crates/engine/src", &["candidate", "snapshot"], "candidate rules are a snapshot in that of the rules in force"),
];
const ALGORITHMS: &[&str] = &[
    "adaptive",
    "assignments",
    "bucket",
    "concurrency",
    "debt_bucket",
    "first_request",
    "fixed_window",
    "forecast",
    "gcra",
    "large_bucket",
    "leaky_bucket",
    "leased_bucket",
    "limit_spec",
    "list",
    "penalty",
    "program",
    "reports",
    "scheduled_window",
    "shares",
    "sliding_log",
    "sliding_window",
    "token_bucket",
    "warm_up",
];

/// The folders of the checked crates.
fn crates() -> Vec<String> {
    let mut folders = vec!["src".to_owned(), "client/src".to_owned()];
    for entry in std::fs::read_dir(super::support::repository("crates")).unwrap() {
        folders.push(format!("crates/{}/src", entry.unwrap().file_name().into_string().unwrap()));
    }
    folders
}

/// The names in a path of modules: `["transport", "grpc"]` for `src/transport/grpc/mod.rs`.
type Module = Vec<String>;

/// Collects the parts of its crate that one module uses. Tests and fuzz targets may use anything.
struct Uses<'m> {
    module: &'m Module,
    /// Absolute paths. Their last names may be items.
    paths: Vec<Module>,
}

impl Uses<'_> {
    /// Adds a path if it begins in this crate.
    fn add(&mut self, path: &[String]) {
        let mut absolute = match path.first().map(String::as_str) {
            Some("crate") => Vec::new(),
            Some("self" | "super") => self.module.clone(),
            _ => return,
        };
        for name in path {
            match name.as_str() {
                "crate" | "self" => {}
                "super" => drop(absolute.pop()),
                name => absolute.push(name.to_owned()),
            }
        }
        self.paths.push(absolute);
    }

    fn add_tree(&mut self, tree: &syn::UseTree, prefix: &[String]) {
        let with = |name: &syn::Ident| [prefix, &[name.to_string()]].concat();
        match tree {
            syn::UseTree::Path(path) => self.add_tree(&path.tree, &with(&path.ident)),
            syn::UseTree::Name(name) => self.add(&with(&name.ident)),
            syn::UseTree::Rename(rename) => self.add(&with(&rename.ident)),
            syn::UseTree::Glob(_) => self.add(prefix),
            syn::UseTree::Group(group) => {
                for tree in &group.items {
                    self.add_tree(tree, prefix);
                }
            }
        }
    }
}

/// Returns whether an item is compiled for tests or fuzzing only.
fn is_for_tests(attributes: &[syn::Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let syn::Meta::List(list) = &attribute.meta else {
            return false;
        };
        list.path.is_ident("cfg") && list.tokens.to_string().contains("test")
    })
}

impl<'ast> Visit<'ast> for Uses<'_> {
    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        if !is_for_tests(&item.attrs) {
            visit::visit_item_mod(self, item);
        }
    }

    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        if !is_for_tests(&item.attrs) {
            visit::visit_item_fn(self, item);
        }
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        if !is_for_tests(&item.attrs) {
            self.add_tree(&item.tree, &[]);
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let names: Vec<_> = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
        self.add(&names);
        visit::visit_path(self, path);
    }
}

/// The modules of one crate, and the uses between them.
#[derive(Default)]
struct Crate {
    /// Each module with the paths that it uses.
    uses: BTreeMap<Module, Vec<Module>>,
    /// The module that an item comes from which its parent reexports, by the path under the parent.
    reexports: BTreeMap<Module, Module>,
}

impl Crate {
    fn read(folder: &str) -> Self {
        let mut read = Self::default();
        let sources = rust_sources(folder);
        let mut files = Vec::new();
        for (path, text) in &sources {
            let name = path.strip_prefix(folder).unwrap().trim_start_matches('/').trim_end_matches(".rs");
            let mut module: Module = name.split('/').map(str::to_owned).collect();
            if module.last().is_some_and(|last| ["lib", "main", "mod"].contains(&last.as_str())) {
                module.pop();
            }
            files.push((module, syn::parse_file(text).unwrap_or_else(|error| panic!("{path}: {error}"))));
        }
        for (module, file) in &files {
            let mut uses = Uses { module, paths: Vec::new() };
            uses.visit_file(file);
            for item in &file.items {
                let syn::Item::Use(item) = item else { continue };
                if !matches!(item.vis, syn::Visibility::Inherited) {
                    let mut reexported = Uses { module, paths: Vec::new() };
                    let with_self = [String::from("self")];
                    reexported.add_tree(&item.tree, &[]);
                    // `pub use child::Item` has no `self::`.
                    reexported.add_tree(&item.tree, &with_self);
                    for path in reexported.paths {
                        if let Some(name) = path.last().filter(|_| path.len() > module.len() + 1) {
                            read.reexports.insert([&module[..], std::slice::from_ref(name)].concat(), path.clone());
                        }
                    }
                }
            }
            read.uses.insert(module.clone(), uses.paths);
        }
        read
    }

    /// Returns the module that a path leads to.
    fn resolve(&self, path: &Module) -> Module {
        let mut module = Module::new();
        for name in path {
            let inner = [&module[..], std::slice::from_ref(name)].concat();
            if self.uses.contains_key(&inner) {
                module = inner;
                continue;
            }
            return match self.reexports.get(&inner) {
                Some(target) if target != path => self.resolve(target),
                _ => module,
            };
        }
        module
    }

    /// Returns the modules of each folder, each with its neighbours that it and the modules inside it use.
    fn neighbours(&self) -> BTreeMap<Module, BTreeMap<String, BTreeSet<String>>> {
        let mut folders: BTreeMap<Module, BTreeMap<String, BTreeSet<String>>> = BTreeMap::new();
        for (module, paths) in &self.uses {
            if module.iter().any(|name| TEST_MODULES.contains(&name.as_str())) {
                continue;
            }
            for path in paths {
                let used = self.resolve(path);
                let shared = module.iter().zip(&used).take_while(|(one, other)| one == other).count();
                if shared < module.len() && shared < used.len() {
                    let folder = folders.entry(module[..shared].to_vec()).or_default();
                    folder.entry(module[shared].clone()).or_default().insert(used[shared].clone());
                }
            }
        }
        folders
    }
}

/// Modules that are compiled for tests or fuzzing only.
const TEST_MODULES: [&str; 7] = ["fuzz", "laws", "model", "redis_model", "simulation", "testing", "tests"];

/// Returns whether a module leads back to itself.
fn is_in_circle(module: &str, neighbours: &BTreeMap<String, BTreeSet<String>>) -> bool {
    let mut seen = BTreeSet::new();
    let mut next: Vec<&String> = neighbours.get(module).into_iter().flatten().collect();
    while let Some(name) = next.pop() {
        if name == module {
            return true;
        }
        if seen.insert(name) {
            next.extend(neighbours.get(name).into_iter().flatten());
        }
    }
    false
}

#[test]
fn no_module_leads_back_to_itself() {
    let mut circles = Vec::new();
    let mut edges = 0;
    for folder in crates() {
        for (module, neighbours) in Crate::read(&folder).neighbours() {
            let folder = [std::slice::from_ref(&folder), &module[..]].concat().join("/");
            edges += neighbours.values().map(BTreeSet::len).sum::<usize>();
            let permitted = PERMITTED.iter().find(|(permitted, ..)| *permitted == folder);
            let permitted = permitted.map_or(&[][..], |(_, modules, _)| modules);
            let circle: Vec<_> = neighbours.keys().filter(|name| is_in_circle(name, &neighbours)).collect();
            let unexpected: Vec<_> = circle.iter().filter(|name| !permitted.contains(&name.as_str())).collect();
            if !unexpected.is_empty() {
                circles.push(format!("{folder}: {circle:?}"));
            }
        }
    }
    assert!(edges > 400, "only {edges} uses of other modules were found");
    assert!(circles.is_empty(), "these modules use each other in a circle:\n{}", circles.join("\n"));
}
