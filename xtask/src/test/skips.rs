//! What was skipped, and what may be skipped in CI.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::io;
use std::path::Path;

/// One case that was not run, and why.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Skip {
    pub(super) name: String,
    pub(super) reason: String,
}

impl Skip {
    pub(super) fn new(name: impl Into<String>, reason: impl Into<String>) -> Self {
        Self { name: name.into(), reason: reason.into() }
    }

    /// Reads `NAME: reason`, the form in which it is both written by tests and listed for CI.
    fn parse(line: &str) -> Result<Self, String> {
        let (name, reason) = line.split_once(':').ok_or_else(|| format!("`{line}` is not `NAME: reason`"))?;
        let (name, reason) = (name.trim(), reason.trim());
        let is_name = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        if name.is_empty() || !name.chars().all(is_name) {
            return Err(format!("the name `{name}` is not of letters, digits, `-`, `_` and `.`"));
        }
        if reason.is_empty() {
            return Err(format!("`{name}` has no reason"));
        }
        Ok(Self::new(name, reason))
    }
}

impl fmt::Display for Skip {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.name, self.reason)
    }
}

/// What may be skipped in CI: lines of `NAME: reason`, and comments after `#`.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct SkipList(BTreeMap<String, String>);

impl SkipList {
    /// Reads the list; an error begins with its line number.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let mut list = BTreeMap::new();
        for (number, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let Skip { name, reason } =
                Skip::parse(line).map_err(|fault| format!("{}: {fault}", number + 1))?;
            if list.insert(name.clone(), reason).is_some() {
                return Err(format!("{}: `{name}` is listed twice", number + 1));
            }
        }
        Ok(Self(list))
    }

    pub(super) fn contains(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }
}

/// The skips that tests reported into `dir`, sorted: each file there holds one line of `NAME: reason`.
pub(super) fn collect(dir: &Path) -> io::Result<Vec<Skip>> {
    let mut skips = Vec::new();
    for entry in fs::read_dir(dir)? {
        let line = fs::read_to_string(entry?.path())?;
        skips.push(Skip::parse(line.trim()).map_err(io::Error::other)?);
    }
    skips.sort();
    Ok(skips)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_has_names_reasons_and_comments() {
        let list = SkipList::parse("# why\n\nmiri: not: there\n  numa-2.nodes:one node\n").unwrap();
        assert_eq!(list.names().collect::<Vec<_>>(), ["miri", "numa-2.nodes"]);
        assert!(list.contains("miri") && !list.contains("why"));
    }

    #[test]
    fn what_is_not_a_list_is_an_error_with_its_line() {
        for (text, part) in [
            ("miri\n", "1: `miri` is not"),
            ("# x\nmiri:\n", "2: `miri` has no reason"),
            (": reason\n", "1: the name ``"),
            ("a b: reason\n", "1: the name `a b`"),
            ("a: x\na: y\n", "2: `a` is listed twice"),
        ] {
            let fault = SkipList::parse(text).unwrap_err();
            assert!(fault.starts_with(part), "{fault}");
        }
    }

    #[test]
    fn reported_skips_are_collected_and_sorted() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(collect(dir.path()).unwrap(), []);
        fs::write(dir.path().join("1"), "b: y\n").unwrap();
        fs::write(dir.path().join("2"), "a: x\n").unwrap();
        assert_eq!(collect(dir.path()).unwrap(), [Skip::new("a", "x"), Skip::new("b", "y")]);
        fs::write(dir.path().join("3"), "broken").unwrap();
        assert!(collect(dir.path()).unwrap_err().to_string().contains("broken"));
    }
}
