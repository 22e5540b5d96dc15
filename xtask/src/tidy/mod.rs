//! `tidy`, a step of `cargo xtask test`: rules of the house that no other tool checks.
//!
//! The rules are functions from text to faults; this file only finds what they apply to.

mod book;
mod crates;
mod text;

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::Path;
use std::process::Command;

use cargo_metadata::Metadata;

/// Every fault in the source tree of `metadata`, a line each.
pub(crate) fn check(metadata: &Metadata) -> io::Result<Vec<String>> {
    let root = metadata.workspace_root.as_std_path();
    let files = source_files(root)?;
    let mut faults = Vec::new();
    for path in &files {
        let Ok(content) = String::from_utf8(fs::read(root.join(path))?) else { continue };
        faults.extend(text::faults(path, &content));
        if book::has_checked_links(path) {
            faults.extend(book::dead_links(path, &content, |target| root.join(target).exists()));
        }
    }
    for package in &metadata.packages {
        faults.extend(crates::check(root, package, &files)?);
    }
    faults.extend(book::check(root, &files)?);
    Ok(faults)
}

/// The files under version control, and those that soon will be, as paths from the root.
fn source_files(root: &Path) -> io::Result<BTreeSet<String>> {
    let mut git = Command::new("git");
    git.current_dir(root).args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"]);
    let output = git.output()?;
    if !output.status.success() {
        return Err(io::Error::other(format!("git ls-files: {}", String::from_utf8_lossy(&output.stderr))));
    }
    let names = String::from_utf8_lossy(&output.stdout).into_owned();
    // What was deleted and not yet committed is still listed.
    Ok(names.split('\0').filter(|name| root.join(name).is_file()).map(str::to_owned).collect())
}
