//! Bounded reads of files and folders that somebody else wrote.

use std::fs::{self, File};
use std::io::Read;
use std::path::Path;

/// The longest file that is read: a page, as long as an attribute of sysfs can be.
const FILE_LIMIT: u64 = 4096;
/// The most entries of a folder that are looked at.
const ENTRY_LIMIT: usize = 4096;

/// The text of a small file without the space around it; `None` where there is none, or what is there is no regular
/// file, longer than a page, or not text.
pub(super) fn text(path: impl AsRef<Path>) -> Option<String> {
    let path = path.as_ref();
    // To open a pipe would wait for whoever writes into it.
    if !fs::metadata(path).ok()?.is_file() {
        return None;
    }
    let mut bytes = Vec::new();
    File::open(path).ok()?.take(FILE_LIMIT + 1).read_to_end(&mut bytes).ok()?;
    if bytes.len() as u64 > FILE_LIMIT {
        return None;
    }
    let text = String::from_utf8(bytes).ok()?;
    let text = text.trim();
    // What is printed later must not steer a terminal.
    (!text.chars().any(|c| c.is_control() && c != '\n' && c != '\t')).then(|| text.to_owned())
}

/// The names in a folder, in order; none where there is no such folder.
pub(super) fn names(folder: impl AsRef<Path>) -> Vec<String> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let mut names: Vec<String> = entries
        .take(ENTRY_LIMIT)
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter(|name| !name.chars().any(char::is_control))
        .collect();
    names.sort();
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_read_where_it_is_short_and_plain() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        let read = |content: &[u8]| {
            fs::write(&file, content).unwrap();
            text(&file)
        };
        assert_eq!(read(b" 4: ACTIVE\n").as_deref(), Some("4: ACTIVE"));
        assert_eq!(read(&[b'x'; 4096]).map(|text| text.len()), Some(4096));
        for bad in [&[b'x'; 4097][..], b"\xff", b"\x1b[31mred"] {
            assert_eq!(read(bad), None);
        }
        assert_eq!(text(folder.path()), None, "a folder");
        assert_eq!(text(folder.path().join("none")), None);
    }

    #[test]
    fn names_are_in_order() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["b", "a", "\x1bc"] {
            fs::write(folder.path().join(name), "").unwrap();
        }
        assert_eq!(names(folder.path()), ["a", "b"]);
        assert!(names(folder.path().join("none")).is_empty());
    }
}
