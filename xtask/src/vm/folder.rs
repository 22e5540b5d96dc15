//! The folder of one run, which goes when the run ends; what a run that was killed has left goes with the next one.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// How the names of all such folders begin.
const PREFIX: &str = "posthorse-vm-";

/// A file in each: a folder without it is somebody's for another purpose, however it is called.
const MARK: &str = "run";

/// A new folder, held by a lock on it for as long as this process has it.
#[derive(Debug)]
pub(super) struct RunFolder {
    folder: tempfile::TempDir,
    _lock: File,
}

impl RunFolder {
    /// Makes one in `parent`, after those are removed that nobody holds.
    pub(super) fn new(parent: &Path) -> io::Result<Self> {
        sweep(parent)?;
        loop {
            let folder = tempfile::Builder::new().prefix(PREFIX).tempdir_in(parent)?;
            // Before it is locked, another run may sweep it away.
            let lock = match File::open(folder.path()) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                opened => opened?,
            };
            lock.lock()?;
            if is_at(&lock, folder.path()) {
                File::create(folder.path().join(MARK))?;
                return Ok(Self { folder, _lock: lock });
            }
        }
    }

    pub(super) fn path(&self) -> &Path {
        self.folder.path()
    }

    /// The path of the file `name` within.
    pub(super) fn file(&self, name: &str) -> PathBuf {
        self.path().join(name)
    }
}

/// Removes the folders that nobody holds. Those of other users stay.
fn sweep(parent: &Path) -> io::Result<()> {
    for entry in fs::read_dir(parent)? {
        let Ok(entry) = entry else { continue };
        let ours = entry.file_name().as_encoded_bytes().starts_with(PREFIX.as_bytes());
        if ours
            && entry.path().join(MARK).is_file()
            && let Ok(lock) = File::open(entry.path())
            && lock.try_lock().is_ok()
        {
            // Another run may sweep at the same time, and another user's folder refuses.
            let _ = fs::remove_dir_all(entry.path());
        }
    }
    Ok(())
}

/// Whether the open `folder` is still the one at `path`.
fn is_at(folder: &File, path: &Path) -> bool {
    let key = |data: fs::Metadata| (data.dev(), data.ino());
    folder.metadata().and_then(|held| Ok(key(held) == key(fs::metadata(path)?))).unwrap_or(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_killed_run_has_left_goes_and_what_is_held_stays() {
        let parent = tempfile::tempdir().unwrap();
        let left = parent.path().join("posthorse-vm-left");
        let other = parent.path().join("other");
        fs::create_dir(&left).unwrap();
        fs::write(left.join(MARK), "").unwrap();
        let cache = parent.path().join("posthorse-vm-cache");
        fs::create_dir(&cache).unwrap();
        fs::create_dir(&other).unwrap();
        let first = RunFolder::new(parent.path()).unwrap();
        assert!(!left.exists() && other.exists() && cache.exists());
        let second = RunFolder::new(parent.path()).unwrap();
        assert!(first.path().exists() && second.path().exists());
        let path = first.path().to_owned();
        drop(first);
        assert!(!path.exists() && second.path().exists());
    }

    #[test]
    fn a_folder_that_was_swept_away_is_noticed() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("x");
        fs::create_dir(&path).unwrap();
        let lock = File::open(&path).unwrap();
        assert!(is_at(&lock, &path));
        fs::remove_dir(&path).unwrap();
        assert!(!is_at(&lock, &path));
        fs::create_dir(&path).unwrap();
        assert!(!is_at(&lock, &path));
    }
}
