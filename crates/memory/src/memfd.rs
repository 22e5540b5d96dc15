//! Files in memory that cannot be resized (`memfd_create(2)`, "Seals" in `fcntl(2)`).

use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use posthorse_core::{Error, ErrorKind, Result};
use rustix::fs::{
    MemfdFlags, Mode, OFlags, SealFlags, fchmod, fcntl_add_seals, fcntl_get_seals, fstat, fstatfs, ftruncate,
    memfd_create, open,
};
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

/// A memfd of `size` bytes that nobody can resize, and no other user can open; `name` is seen in `/proc` alone.
///
/// # Errors
/// `Io` with what the system says.
pub fn sealed_file(name: &str, size: usize) -> Result<OwnedFd> {
    create(name, size, false).map_err(|error| refused(size, error))
}

fn refused(size: usize, error: Errno) -> Error {
    let error = Error::os(&format!("making a file in memory of {size} bytes"), &error.into());
    if error.os_error() == Some(Errno::FBIG.raw_os_error()) {
        error.with_advice("raise RLIMIT_FSIZE (`ulimit -f`), which holds for files in memory too")
    } else {
        error
    }
}

/// The system would say so by a signal that ends the process.
fn check_limit(size: usize, limit: Option<u64>) -> Result<(), Errno> {
    if limit.is_some_and(|limit| limit < size as u64) { Err(Errno::FBIG) } else { Ok(()) }
}

pub(crate) fn create(name: &str, size: usize, hugetlb: bool) -> Result<OwnedFd, Errno> {
    check_limit(size, getrlimit(Resource::Fsize).current)?;
    let kind = if hugetlb { MemfdFlags::HUGETLB } else { MemfdFlags::empty() };
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | kind;
    let fd = match memfd_create(name, flags | MemfdFlags::NOEXEC_SEAL) {
        // Before Linux 6.3 a memfd could not be made without the right to execute it.
        Err(Errno::INVAL) => memfd_create(name, flags)?,
        other => other?,
    };
    // By default every user may open it through /proc/PID/fd, if they can see that.
    fchmod(&fd, Mode::RUSR | Mode::WUSR)?;
    ftruncate(&fd, size as u64)?;
    fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(fd)
}

/// Another descriptor of the same file in memory, through which it can only be read.
///
/// # Errors
/// What the system says when `/proc` is not mounted.
pub fn reopen_read_only(fd: impl AsFd) -> Result<OwnedFd> {
    let path = format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd());
    open(&path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).map_err(|error| {
        Error::os(&format!("opening {path} read-only"), &error.into())
            .with_advice("/proc must be mounted: a file in memory has no other name")
    })
}

/// Refuses a file that is shorter than `end` bytes, or that somebody could make so: to touch a page that was
/// truncated away kills the process (SIGBUS).
pub(crate) fn check_sealed(fd: impl AsFd, end: u64) -> Result<()> {
    let fd = fd.as_fd();
    let seals = fcntl_get_seals(fd).unwrap_or(SealFlags::empty());
    if !seals.contains(SealFlags::SHRINK) {
        return Err(Error::new(
            ErrorKind::AccessDenied,
            "the file is not sealed against shrinking (F_SEAL_SHRINK), so its owner could crash whoever maps it",
        )
        .with_advice("share memory as a sealed memfd"));
    }
    // After the seals, so that what is read here stays true.
    let size = fstat(fd).map_err(|error| Error::os("fstat of a shared file", &error.into()))?.st_size as u64;
    if end > size {
        return Err(Error::new(
            ErrorKind::OutOfBounds,
            format!("the range up to byte {end} leaves the shared file of {size} bytes"),
        ));
    }
    Ok(())
}

/// The page size of the file if it lies in hugetlbfs.
pub(crate) fn hugetlb_page_of(fd: impl AsFd) -> Option<usize> {
    let stat = fstatfs(fd).ok()?;
    (stat.f_type as u64 == libc::HUGETLBFS_MAGIC as u64).then_some(stat.f_bsize as usize)
}

#[cfg(all(test, not(miri)))]
mod tests {
    use super::*;

    #[test]
    fn a_created_file_cannot_be_resized_or_opened_by_others() {
        let fd = create("test", 8192, false).unwrap();
        assert_eq!(ftruncate(&fd, 4096), Err(Errno::PERM));
        assert_eq!(ftruncate(&fd, 16384), Err(Errno::PERM));
        assert_eq!(fcntl_add_seals(&fd, SealFlags::WRITE), Err(Errno::PERM), "the seals are sealed");
        assert_eq!(fstat(&fd).unwrap().st_mode & 0o777, 0o600);
        check_sealed(&fd, 8192).unwrap();
        assert_eq!(check_sealed(&fd, 8193).unwrap_err().kind(), ErrorKind::OutOfBounds);
        assert_eq!(hugetlb_page_of(&fd), None);
    }

    #[test]
    fn a_file_that_could_shrink_is_refused() {
        let fd = memfd_create("open", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&fd, 8192).unwrap();
        fcntl_add_seals(&fd, SealFlags::GROW).unwrap();
        assert_eq!(check_sealed(&fd, 4096).unwrap_err().kind(), ErrorKind::AccessDenied);
        let file = std::fs::File::open("/proc/self/exe").unwrap();
        assert_eq!(check_sealed(&file, 1).unwrap_err().kind(), ErrorKind::AccessDenied);
    }

    #[test]
    fn a_read_only_descriptor_cannot_write() {
        let fd = create("test", 4096, false).unwrap();
        let read_only = reopen_read_only(&fd).unwrap();
        assert_eq!(rustix::io::write(&read_only, b"x"), Err(Errno::BADF));
        check_sealed(&read_only, 4096).unwrap();
    }

    #[test]
    fn a_file_beyond_the_limit_of_files_is_refused_before_the_system_sends_a_signal() {
        check_limit(4096, Some(4096)).unwrap();
        check_limit(usize::MAX, None).unwrap();
        let error = refused(4097, check_limit(4097, Some(4096)).unwrap_err()).to_string();
        assert!(error.contains("4097 bytes") && error.contains("RLIMIT_FSIZE"), "{error}");
    }
}
