//! The files of the host that is looked at.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

/// Far longer than any file that is looked at.
const FILE_LIMIT: u64 = 1 << 20;
const ENTRY_LIMIT: usize = 4096;

/// A host, or a folder that looks like one. Paths are relative to its root.
pub(super) struct Host {
    root: PathBuf,
    variables: BTreeMap<String, String>,
}

impl Host {
    /// That of this process.
    pub(super) fn this() -> Self {
        let text = |name: &str| Some((name.to_owned(), std::env::var(name).ok()?));
        let variables = ["CUDA_MPS_PIPE_DIRECTORY", "LD_LIBRARY_PATH"].into_iter().filter_map(text);
        Self { root: PathBuf::from("/"), variables: variables.collect() }
    }

    pub(super) fn path(&self, path: impl AsRef<Path>) -> PathBuf {
        let path = path.as_ref();
        self.root.join(path.strip_prefix("/").unwrap_or(path))
    }

    pub(super) fn has(&self, path: impl AsRef<Path>) -> bool {
        self.path(path).exists()
    }

    /// The bytes of a file; `None` where there is none, or it is no regular file: to open a pipe would wait.
    pub(super) fn bytes(&self, path: impl AsRef<Path>) -> Option<Vec<u8>> {
        let path = self.path(path);
        if !fs::metadata(&path).ok()?.is_file() {
            return None;
        }
        let mut bytes = Vec::new();
        File::open(path).ok()?.take(FILE_LIMIT).read_to_end(&mut bytes).ok()?;
        Some(bytes)
    }

    /// The text of a file, without the space around it.
    pub(super) fn text(&self, path: impl AsRef<Path>) -> Option<String> {
        Some(String::from_utf8_lossy(&self.bytes(path)?).trim().to_owned())
    }

    /// The names in a folder, in order.
    pub(super) fn names(&self, folder: impl AsRef<Path>) -> Vec<String> {
        let entries = fs::read_dir(self.path(folder)).into_iter().flatten().take(ENTRY_LIMIT).flatten();
        let mut names: Vec<String> =
            entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
        names.sort();
        names
    }

    pub(super) fn variable(&self, name: &str) -> Option<&str> {
        self.variables.get(name).map(String::as_str)
    }

    /// What follows `key` on its line of a file of lines such as `Seccomp:  0`.
    pub(super) fn field(&self, path: &str, key: &str) -> Option<String> {
        let text = self.text(path)?;
        text.lines().find_map(|line| Some(line.strip_prefix(key)?.strip_prefix(':')?.trim().to_owned()))
    }

    /// The soft limit of this process that `/proc/self/limits` has under a name: `None` when it has none such, and
    /// `Some(None)` when nothing is limited.
    pub(super) fn limit(&self, name: &str) -> Option<Option<u64>> {
        let text = self.text("proc/self/limits")?;
        let rest = text.lines().find_map(|line| line.strip_prefix(name))?;
        match rest.split_whitespace().next()? {
            "unlimited" => Some(None),
            number => number.parse().ok().map(Some),
        }
    }

    /// Whether this process has the capability of this number; `None` where the kernel does not say.
    pub(super) fn capability(&self, number: u32) -> Option<bool> {
        let set = u64::from_str_radix(&self.field("proc/self/status", "CapEff")?, 16).ok()?;
        Some(set.checked_shr(number).is_some_and(|bits| bits & 1 == 1))
    }

    /// Whether this process is in the first user namespace, where capabilities count for the whole kernel.
    pub(super) fn is_first_namespace(&self) -> bool {
        let map = self.text("proc/self/uid_map").unwrap_or_default();
        map.split_whitespace().collect::<Vec<_>>() == ["0", "0", "4294967295"]
    }

    /// Major and minor version of the kernel.
    pub(super) fn kernel(&self) -> Option<(u32, u32)> {
        let text = self.text("proc/sys/kernel/osrelease")?;
        let mut parts = text.split(|c: char| !c.is_ascii_digit());
        Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A host that has these files and nothing else.
    pub(in crate::doctor) struct Fake {
        pub(in crate::doctor) host: Host,
        _folder: tempfile::TempDir,
    }

    pub(in crate::doctor) fn fake(files: &[(&str, &str)]) -> Fake {
        let folder = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = folder.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        Fake { host: Host { root: folder.path().to_owned(), variables: BTreeMap::new() }, _folder: folder }
    }

    impl Fake {
        pub(in crate::doctor) fn with(mut self, name: &str, value: &str) -> Self {
            self.host.variables.insert(name.to_owned(), value.to_owned());
            self
        }
    }

    #[test]
    fn limits_capabilities_and_versions_are_read() {
        let fake = fake(&[
            (
                "proc/self/limits",
                "Max open files            20000                20000                files\n\
                 Max locked memory         unlimited            unlimited            bytes\n",
            ),
            ("proc/self/status", "Name:\tx\nCapEff:\t0000000000004000\n"),
            ("proc/self/uid_map", "         0          0 4294967295\n"),
            ("proc/sys/kernel/osrelease", "6.18.44-custom\n"),
        ]);
        let host = &fake.host;
        assert_eq!(host.limit("Max open files"), Some(Some(20_000)));
        assert_eq!(host.limit("Max locked memory"), Some(None));
        assert_eq!(host.limit("Max nothing"), None);
        assert_eq!(
            (host.capability(14), host.capability(19), host.capability(99)),
            (Some(true), Some(false), Some(false))
        );
        assert_eq!(host.kernel(), Some((6, 18)));
        assert!(host.is_first_namespace());
        assert!(host.bytes("proc").is_none(), "a folder");
    }
}
