//! Rules on the documentation: its table of contents is complete, and no link inside the tree is dead.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Component, Path, PathBuf};

const PAGES: &str = "docs/src/";
const CONTENTS: &str = "docs/src/SUMMARY.md";

/// Whether the links of the file at `path` are checked: the book's, and those of the pages at the root.
///
/// A crate's README is also its rustdoc page, where a link may name an item; rustdoc checks those.
pub(super) fn has_checked_links(path: &str) -> bool {
    path.ends_with(".md") && (path.starts_with(PAGES) || !path.contains('/'))
}

/// The faults of the book's table of contents; a tree without a book has none.
pub(super) fn check(root: &Path, files: &BTreeSet<String>) -> io::Result<Vec<String>> {
    let pages: Vec<&str> = files
        .iter()
        .map(String::as_str)
        .filter(|file| file.starts_with(PAGES) && file.ends_with(".md"))
        .collect();
    if pages.is_empty() {
        return Ok(Vec::new());
    }
    let contents = match fs::read_to_string(root.join(CONTENTS)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
        read => read?,
    };
    Ok(unlisted(&contents, &pages))
}

/// The pages that the table of contents does not link to.
fn unlisted(contents: &str, pages: &[&str]) -> Vec<String> {
    let listed: BTreeSet<PathBuf> = links(contents).map(|(_, target)| resolve(CONTENTS, target)).collect();
    pages
        .iter()
        .filter(|page| **page != CONTENTS && !listed.contains(Path::new(page)))
        .map(|page| format!("{page}: not in {CONTENTS}"))
        .collect()
}

/// The links of the page `path` to files that do not exist.
pub(super) fn dead_links(path: &str, content: &str, exists: impl Fn(&Path) -> bool) -> Vec<String> {
    links(content)
        .filter(|(_, target)| !exists(&resolve(path, target)))
        .map(|(line, target)| format!("{path}:{line}: dead link to {target}"))
        .collect()
}

/// The links to files in a Markdown text, with their line numbers; code blocks and web addresses are passed over.
fn links(content: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut in_code = false;
    content.lines().enumerate().flat_map(move |(number, line)| {
        in_code ^= line.trim_start().starts_with("```");
        let line = if in_code { "" } else { line };
        // `[text](target)`, and on a line of its own `[name]: target`.
        let defined = line.strip_prefix('[').and_then(|rest| rest.split_once("]: ")).map(|(_, rest)| rest);
        line.split("](").skip(1).chain(defined).filter_map(move |rest| {
            let target = rest.split([')', '#', ' ']).next()?;
            (!target.is_empty() && !target.contains(':')).then_some((number + 1, target))
        })
    })
}

/// Where a link on the page `page` leads, as a path from the root.
fn resolve(page: &str, target: &str) -> PathBuf {
    let mut path = PathBuf::from(page);
    path.pop();
    for part in Path::new(target).components() {
        match part {
            Component::ParentDir => {
                path.pop();
            }
            Component::CurDir => {}
            part => path.push(part),
        }
    }
    path
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_page_must_be_listed() {
        let contents = "# Summary\n- [One](one.md)\n  - [Two](./deep/two.md)\n";
        let pages = ["docs/src/SUMMARY.md", "docs/src/one.md", "docs/src/deep/two.md", "docs/src/three.md"];
        assert_eq!(unlisted(contents, &pages), ["docs/src/three.md: not in docs/src/SUMMARY.md"]);
    }

    #[test]
    fn a_dead_link_names_its_line_and_target() {
        let page = "see [a](a.md#part) and [b](../../b.md)\n[web](https://example.org/x.md) [here](#part)\n\
                    ```\n[code](gone.md)\n```\n[ref]: gone.md\n[far]: https://example.org/y.md\n";
        let exists = |path: &Path| path == Path::new("docs/src/a.md");
        assert_eq!(
            dead_links("docs/src/page.md", page, exists),
            ["docs/src/page.md:1: dead link to ../../b.md", "docs/src/page.md:6: dead link to gone.md"]
        );
        assert_eq!(dead_links("docs/src/page.md", page, |_| true), Vec::<String>::new());
        let seen = |path: &Path| {
            ["docs/src/a.md", "docs/src/gone.md", "b.md"].into_iter().any(|known| path == Path::new(known))
        };
        assert_eq!(dead_links("docs/src/page.md", page, seen), Vec::<String>::new());
    }

    #[test]
    fn links_are_checked_in_the_book_and_at_the_root() {
        assert!(has_checked_links("docs/src/a.md") && has_checked_links("README.md"));
        assert!(!has_checked_links("crates/core/README.md") && !has_checked_links("docs/book.toml"));
    }
}
