#!/usr/bin/env python3
"""Prints what a release contains besides the service's own code.

    inventory.py licences [NAME=FILE ...]    the licence texts of all dependencies, and of these other parts
    inventory.py sbom [NAME=VERSION ...]     a CycloneDX 1.6 document, with these other parts

Both read what Cargo resolves for the release targets; the same input gives the same bytes. The tests run this script, so
it needs only Python and Cargo. docs/design/releases.md has the reasons against cargo-cyclonedx and cargo-about.
"""

import html
import json
import os
import re
import subprocess
import sys
import tomllib
import uuid
from datetime import datetime, timezone
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TARGETS = ["x86_64-unknown-linux-musl", "aarch64-unknown-linux-musl"]
SERVICE = "sluicegate"
LICENCE_FILE = re.compile(r"(un)?licen[cs]e|copying|copyright|notice", re.IGNORECASE)
SOURCE_FILE = {".c", ".h", ".json", ".py", ".rs", ".toml", ".tmpl", ".yml"}
# Rows of console/vendor/README.md: file, version, licence and its file, ..., name of the npm package.
VENDORED = re.compile(r"^\| `[^`]+` \| (\S+) \| (\S+) \(`(\S+)`\) \| [^|]+ \| (\S+) \|", re.MULTILINE)


def cargo(*arguments):
    """Runs Cargo in the workspace and returns its output."""
    return subprocess.run(["cargo", *arguments], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def dependencies(edges):
    """Returns a dictionary from each crate of the service to the crates it depends on, over these kinds of edges."""
    graph = {}
    for target in TARGETS:
        tree = cargo("tree", "--locked", "-p", SERVICE, "-e", edges, "--target", target, "--prefix", "depth")
        path = []
        for line in tree.splitlines():
            depth, name, version = re.match(r"(\d+)(\S+) v(\S+)", line).groups()
            crate = (name, version)
            path[int(depth):] = [crate]
            graph.setdefault(crate, set())
            if len(path) > 1:
                graph[path[-2]].add(crate)
    return graph


def packages():
    """Returns Cargo's description of each crate, by name and version."""
    found = json.loads(cargo("metadata", "--locked", "--format-version", "1"))["packages"]
    return {(package["name"], package["version"]): package for package in found}


def licence_files(package):
    """Returns the texts of all licences and notices in a crate, also those of code from elsewhere inside it."""
    folder = Path(package["manifest_path"]).parent
    if package["source"] is None:
        return [(ROOT / "LICENSE").read_text()]
    files = (file for file in sorted(folder.rglob("*")) if LICENCE_FILE.match(file.name) and file.is_file())
    return [file.read_text(errors="replace") for file in files if file.suffix not in SOURCE_FILE]


def licence_texts(crates, described):
    """Returns the licence texts of each crate. A crate without one has the text of its repository or of its licence."""
    texts = {crate: licence_files(described[crate]) for crate in crates}
    repository = lambda crate: re.sub(r"(/tree/.*|\.git)$", "", described[crate]["repository"] or "")
    for crate in [crate for crate in crates if not texts[crate]]:
        same = [other for other in crates if texts[other] and repository(other) == repository(crate) != ""]
        if same:
            texts[crate] = texts[same[0]]
        elif "Apache-2.0" in (described[crate]["license"] or ""):
            texts[crate] = [(ROOT / "LICENSE").read_text()]
        else:
            sys.exit(f"inventory.py: {crate[0]} {crate[1]} has no licence text")
    return texts


def vendored():
    """Returns name, version, licence and licence file of each JavaScript library of the console."""
    rows = VENDORED.findall((ROOT / "console/vendor/README.md").read_text())
    return sorted({(name, version, licence, file) for version, licence, file, name in rows})


def plain(file):
    """Returns a text file, or the text of a page in HTML, such as that of Rust's standard library."""
    text = Path(file).read_text(errors="replace")
    return html.unescape(re.sub(r"<[^>]*>", "", text)) if text.lower().startswith("<!doctype html") else text


def print_licences(others):
    """Prints each licence text once, below the names of all parts that it applies to."""
    described, owners = packages(), {}
    for (name, version), texts in licence_texts(sorted(dependencies("normal,build")), described).items():
        for text in texts if name != SERVICE else []:
            owners.setdefault(text.strip(), []).append(f"{name} {version}")
    for name, version, _, file in vendored():
        owners.setdefault((ROOT / "console/vendor" / file).read_text().strip(), []).append(f"{name} {version}")
    for name, file in others:
        owners.setdefault(plain(file).strip(), []).append(name)
    print("Sluicegate contains code of the projects below, under the licences that follow their names.")
    for text, names in owners.items():
        print("\n" + "=" * 100 + "\n" + "\n".join(sorted(set(names))) + "\n" + "-" * 100 + f"\n\n{text}")


def print_sbom(others):
    """Prints the document. Crates that only run while the service is built have the scope `excluded`."""
    described, graph = packages(), dependencies("normal,build")
    linked = dependencies("normal,no-proc-macro")
    lock = (ROOT / "Cargo.lock").read_text()
    sums = {(each["name"], each["version"]): each.get("checksum") for each in tomllib.loads(lock)["package"]}
    url = lambda crate: f"pkg:cargo/{crate[0]}@{crate[1]}"

    def component(crate):
        package = described[crate]
        result = {"type": "library", "bom-ref": url(crate), "name": crate[0], "version": crate[1], "purl": url(crate)}
        result["scope"] = "required" if crate in linked else "excluded"
        result["licenses"] = [{"expression": package["license"].replace("/", " OR ")}]
        if sums[crate]:
            result["hashes"] = [{"alg": "SHA-256", "content": sums[crate]}]
        if package["repository"]:
            result["externalReferences"] = [{"type": "vcs", "url": package["repository"]}]
        return result

    def other(name, version, kind, licence=None):
        reference = f"pkg:{kind}/{name}@{version}"
        result = {"type": "library", "bom-ref": reference, "name": name, "version": version, "purl": reference}
        return result | ({"licenses": [{"expression": licence}]} if licence else {})

    service = next(crate for crate in graph if crate[0] == SERVICE)
    root = component(service) | {"type": "application"}
    del root["scope"]
    parts = [other(name, version, "npm", licence) for name, version, licence, _ in vendored()]
    parts += [other(name, version, "generic") for name, version in others]
    depends = [{"ref": url(crate), "dependsOn": sorted(map(url, graph[crate]))} for crate in sorted(graph)]
    next(each for each in depends if each["ref"] == url(service))["dependsOn"] += [part["bom-ref"] for part in parts]
    time = datetime.fromtimestamp(int(os.environ.get("SOURCE_DATE_EPOCH", 0)), timezone.utc)
    components = [component(crate) for crate in sorted(graph) if crate != service] + parts
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, json.dumps([url(service), components]))}",
        "version": 1,
        "metadata": {"timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ"), "component": root},
        "components": components,
        "dependencies": depends,
    }
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    commands = {"licences": print_licences, "sbom": print_sbom}
    if len(sys.argv) < 2 or sys.argv[1] not in commands:
        sys.exit(__doc__)
    commands[sys.argv[1]]([argument.split("=", 1) for argument in sys.argv[2:]])
