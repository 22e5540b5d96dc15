//! The library of the system: that a program starts and says what is missing without it, and that nothing is assumed
//! of devices with it.
#![cfg(feature = "rdma")]
#![allow(clippy::unwrap_used)]

use std::fs::File;
use std::process::Command;

use posthorse_core::ErrorKind;
use posthorse_rdma::SystemVerbs;
use posthorse_rdma::verbs::Verbs as _;

/// Set where this program runs without the library.
const WITHOUT: &str = "POSTHORSE_TEST_WITHOUT_LIBIBVERBS";

#[test]
fn a_program_starts_without_the_library_and_says_how_to_get_it() {
    if std::env::var_os(WITHOUT).is_some() {
        let error = SystemVerbs::new().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.message().contains("libibverbs.so.1"), "{error}");
        assert!(error.advice().unwrap().contains("apt-get install libibverbs1"), "{error}");
        // Found once, or once not: the same answer every time.
        assert_eq!(SystemVerbs::new().unwrap_err().to_string(), error.to_string());
        return;
    }
    // The loader takes the first file of the name that it finds, and this one is no library: were it needed for the
    // start, there would be none.
    let folder = tempfile::tempdir().unwrap();
    File::create_new(folder.path().join("libibverbs.so.1")).unwrap();
    let name = "a_program_starts_without_the_library_and_says_how_to_get_it";
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name])
        .env("LD_LIBRARY_PATH", folder.path())
        .env(WITHOUT, "1")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{output:?}");
}

#[test]
fn what_is_listed_can_be_looked_up_and_nothing_else() {
    let verbs = match SystemVerbs::new() {
        Ok(verbs) => verbs,
        // As the other test has it.
        Err(error) => return assert_eq!(error.kind(), ErrorKind::Unsupported),
    };
    let names = verbs.devices().unwrap();
    assert_eq!(verbs.devices().unwrap(), names);
    let error = verbs.open("no_such_device").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    let listed = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
    assert!(error.message().contains("no_such_device") && error.message().ends_with(&listed), "{error}");
}
