//! Rules on one crate.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::Path;

use cargo_metadata::{Package, Target};

/// What the rules look at.
struct Crate<'a> {
    name: &'a str,
    manifest: &'a str,
    has_readme: bool,
    /// The text of every file in `src`.
    sources: &'a [String],
    /// Path and text of the root module of the library and of each binary.
    roots: &'a [(String, String)],
}

/// The faults of `package`, a line each; `files` are all source files, as paths from `root`.
pub(super) fn check(root: &Path, package: &Package, files: &BTreeSet<String>) -> io::Result<Vec<String>> {
    let folder = package.manifest_path.as_std_path().parent().unwrap_or(root);
    let prefix = folder.strip_prefix(root).unwrap_or(folder);
    let own = |file: &str| prefix.join(file).to_string_lossy().into_owned();
    let source_folder = own("src/");
    let sources = files
        .iter()
        .filter(|file| file.starts_with(&source_folder) && file.ends_with(".rs"))
        .map(|file| fs::read_to_string(root.join(file)))
        .collect::<io::Result<Vec<_>>>()?;
    let roots = package
        .targets
        .iter()
        .filter(|target| is_product(target))
        .map(|target| Ok((target.src_path.to_string(), fs::read_to_string(&target.src_path)?)))
        .collect::<io::Result<Vec<_>>>()?;
    Ok(faults(&Crate {
        name: &package.name,
        manifest: &fs::read_to_string(&package.manifest_path)?,
        has_readme: files.contains(&own("README.md")),
        sources: &sources,
        roots: &roots,
    }))
}

fn is_product(target: &Target) -> bool {
    !(target.is_test() || target.is_example() || target.is_bench() || target.is_custom_build())
}

fn faults(this: &Crate<'_>) -> Vec<String> {
    let mut faults = Vec::new();
    if !this.has_readme {
        faults.push(format!("{}: README.md is missing", this.name));
    }
    if !uses_workspace_lints(this.manifest) {
        faults.push(format!("{}: Cargo.toml lacks `[lints]` with `workspace = true`", this.name));
    }
    if !this.sources.iter().any(|source| source.lines().any(is_unsafe)) {
        for (path, _) in this.roots.iter().filter(|(_, text)| !text.contains("#![forbid(unsafe_code)]")) {
            faults.push(format!("{path}: nothing here is unsafe, so say #![forbid(unsafe_code)]"));
        }
    }
    faults
}

fn uses_workspace_lints(manifest: &str) -> bool {
    let mut lines = manifest.lines().map(str::trim).skip_while(|line| *line != "[lints]").skip(1);
    lines.by_ref().take_while(|line| !line.starts_with('[')).any(|line| line == "workspace = true")
}

/// Whether this line of code (comments aside) uses the keyword `unsafe`.
fn is_unsafe(line: &str) -> bool {
    let code = line.split("//").next().unwrap_or_default();
    code.match_indices("unsafe").any(|(at, word)| {
        let before = code[..at].chars().next_back();
        let after = code[at + word.len()..].chars().next();
        let inside =
            |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_' || c == '"' || c == '`');
        !inside(before) && !inside(after)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD_MANIFEST: &str = "[package]\nname = \"a\"\n\n[lints]\nworkspace = true\n";

    fn faults_of(manifest: &str, has_readme: bool, source: &str) -> Vec<String> {
        let root = [("src/lib.rs".to_owned(), source.to_owned())];
        faults(&Crate { name: "a", manifest, has_readme, sources: &[source.to_owned()], roots: &root })
    }

    #[test]
    fn a_good_crate_has_no_faults() {
        assert_eq!(faults_of(GOOD_MANIFEST, true, "#![forbid(unsafe_code)]\n"), Vec::<String>::new());
        assert_eq!(faults_of(GOOD_MANIFEST, true, "unsafe fn f() {}\n"), Vec::<String>::new());
    }

    #[test]
    fn each_rule_finds_its_fault() {
        assert!(faults_of(GOOD_MANIFEST, false, "unsafe {}\n")[0].contains("README.md"));
        assert!(faults_of("[package]\n", true, "unsafe {}\n")[0].contains("[lints]"));
        assert!(faults_of("[lints]\n[x]\nworkspace = true\n", true, "unsafe {}\n")[0].contains("[lints]"));
        let safe = "//! No unsafe here.\n#![deny(unsafe_code)]\nlet x = \"unsafe\"; // unsafe\n";
        assert!(faults_of(GOOD_MANIFEST, true, safe)[0].starts_with("src/lib.rs: nothing here is unsafe"));
    }

    #[test]
    fn the_keyword_is_told_from_words_that_contain_it() {
        for line in ["unsafe {", "    pub unsafe fn f()", "#[unsafe(no_mangle)]", "unsafe extern \"C\" {"] {
            assert!(is_unsafe(line), "{line}");
        }
        for line in ["// unsafe {", "x(); // unsafe", "#![forbid(unsafe_code)]", "unsafely()", "\"unsafe\""] {
            assert!(!is_unsafe(line), "{line}");
        }
    }
}
